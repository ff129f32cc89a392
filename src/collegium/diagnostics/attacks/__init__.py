"""Attacks on what leaves a site: how much of an image or a membership does it give away?

An analysis for simulations and for sites that want to know: an attack is scored against the site's
own data, which no attacker has.
"""
