"""A server that sees only the sum: means of masked replies (secure aggregation).

Bonawitz et al., CCS 2017 (https://doi.org/10.1145/3133956.3133982), simplified: without secret
sharing, so that a site that is lost means a further, short exchange with new masks. In one exchange
of training

1. every site runs its handler and keeps what the server reads by `Replies.mean` alone; a new public
   key leaves in its place, beside what is not averaged;
2. for every mean the server sends the keys of the sites that answered, and every site sends weight
   times value, and the weight, as fixed-point integers modulo 2^32 or 2^64, plus one mask for each
   other site, which both derive from their keys and use with opposite signs;
3. the server adds what arrives. The masks cancel, and it divides by the sum of the weights.

Where a site is lost after 1, the others mask what they keep again under another nonce: nobody
trains twice. Masks are random; the sum that is left is not, whatever the keys.

Deviations from the paper. No secret sharing and no second mask: the server is trusted to say truly
who was lost, and not to use a masked reply that comes late. Weights are inside the sum.

Between hospitals a site signs its key with its certificate, and checks those of the others before
it masks anything, so that the server cannot put its own in their place; see `Identity`. Whoever
holds the authority that issues certificates can, unless a site knows the others' fingerprints. In a
simulation nobody signs.
"""
