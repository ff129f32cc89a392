"""What codecs do to the messages of a run: who holds what, what is encoded, what comes out.

Only training exchanges are coded; evaluation and test send what they send without a codec. Of a
message, every group of tensors with the names of trainable parameters is coded, those inside lists
and dictionaries too, each by itself. Whatever else it holds (running statistics, counters, numbers)
travels as it is.

*Upload.* What is encoded is the difference from what the client received: from the part of the same
name or, where the request has none, from the nearest of its groups if that is nearer than half of
the part's own length; without one, the part itself. What a codec with feedback loses stays at the
client and is added to the next. Where a part was made from one that the server sent (it has the
same name, or comes from a list or dictionary of models), the server adds what it decodes to what it
*sent*, not to what the client received: what a lossy download left out is then still in the
server's model when the next one is encoded, and nothing is lost for good.

*Download.* Both sides keep the part as last decoded, and what is encoded is the difference from
that. Clients that hold the same share one encoding. A client of which the server does not know what
it holds (it is new, failed, or says that it lost it) gets the part in full: as the others decode
it, or the server's own where nobody holds anything.
"""

from collegium.compression.session.client_session import ClientSession, LostReference, Sent
from collegium.compression.session.config import CodecConfig, CodingConfig
from collegium.compression.session.groups import AGAIN, KEY, NO_CODECS, Coding, on_device
from collegium.compression.session.layout import Form
from collegium.compression.session.server_session import Exchange, ServerSession

__all__ = [
    "AGAIN", "KEY", "NO_CODECS", "ClientSession", "CodecConfig", "Coding", "CodingConfig",
    "Exchange", "Form", "LostReference", "Sent", "ServerSession", "on_device",
]  # fmt: skip
