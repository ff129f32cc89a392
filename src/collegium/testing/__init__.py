"""The conformance suite that every algorithm passes, and the toy federation it runs on."""
