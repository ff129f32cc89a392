"""Applies codecs to the messages of a run.

Only training exchanges are coded; messages of evaluation and test are sent as without a codec. In a
message, every group of tensors with the names of trainable parameters is coded separately, also
inside lists and dictionaries. Everything else (running statistics, counters, numbers) is sent as it
is.

*Upload.* The difference from what the client received is encoded: from the part of the same name
or, if the request has none, from the nearest of its groups if that is nearer than half of the
part's own length; otherwise the part itself. What a codec with feedback loses stays at the client
and is added to the next difference. If a part was made from one that the server sent (it has the
same name, or comes from a list or dictionary of models), the server adds what it decodes to what it
*sent*, not to what the client received: what a lossy download omitted is then still in the server's
model when the next one is encoded, and nothing is lost for good.

*Download.* Both sides keep the part as last decoded, and the difference from that is encoded.
Clients that hold the same share one encoding. A client of which the server does not know what it
holds (it is new, failed, or reports that it lost its state) gets the part in full: as the others
decode it, or the server's own if no client holds any version.
"""
