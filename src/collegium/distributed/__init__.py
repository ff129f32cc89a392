"""Federations of real hospitals over NVIDIA FLARE (`pip install 'collegium[flare]'`).

Three processes carry a request: `collegium run` holds the server half and listens on a Unix socket;
the relays in FLARE's job processes at the server and at every site know nothing but a socket; the
site process holds data, network, state and policy. No code travels, and a relay holds no data.
"""
