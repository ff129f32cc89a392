"""How far features drift: what a site's training makes of the model that it received, by rounds.

After Figure 2 of GRACE (Zhang et al., MICCAI 2023, https://doi.org/10.1007/978-3-031-43898-1_2). An
analysis for simulations: it sees the models that a server sees and, which no server does, the
images of the sites and whatever a method keeps of the model at a site.
"""
