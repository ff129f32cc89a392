"""Hospitals train models together, and each ends up with one that is good for its own patients."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collegium.adaptation.average import Average
    from collegium.adaptation.base import Adapter, Sources
    from collegium.adaptation.dsbn import DSBN
    from collegium.adaptation.ensemble import Ensemble
    from collegium.adaptation.none import NoAdaptation
    from collegium.adaptation.outside import adapt_and_score
    from collegium.adaptation.routing import Routing
    from collegium.adaptation.tent import Tent
    from collegium.algorithms.apfl import APFL
    from collegium.algorithms.condist import ConDistFL
    from collegium.algorithms.distance import Distance
    from collegium.algorithms.ditto import Ditto
    from collegium.algorithms.fedadam import FedAdam
    from collegium.algorithms.fedamp import FedAMP
    from collegium.algorithms.fedas import FedAS
    from collegium.algorithms.fedavg import FedAvg
    from collegium.algorithms.fedavgm import FedAvgM
    from collegium.algorithms.fedavgp import FedAvgP
    from collegium.algorithms.fedawa import FedAWA
    from collegium.algorithms.fedbabu import FedBABU
    from collegium.algorithms.fedbn import FedBN
    from collegium.algorithms.feddf import FedDF
    from collegium.algorithms.feddg import FedDG
    from collegium.algorithms.fedevi import FedEvi
    from collegium.algorithms.fedlws import FedLWS
    from collegium.algorithms.fedmtl import FedMTL
    from collegium.algorithms.fednova import FedNova
    from collegium.algorithms.fedper import FedPer
    from collegium.algorithms.fedprox import FedProx
    from collegium.algorithms.fedrdn import FedRDN
    from collegium.algorithms.fedrep import FedRep
    from collegium.algorithms.fedrod import FedRoD
    from collegium.algorithms.fedyogi import FedYogi
    from collegium.algorithms.finetune import FineTune
    from collegium.algorithms.fml import FML
    from collegium.algorithms.fpfc import FPFC
    from collegium.algorithms.grace import Grace
    from collegium.algorithms.harmofl import HarmoFL
    from collegium.algorithms.ifca import IFCA
    from collegium.algorithms.iopfl import IOPFL
    from collegium.algorithms.l2gd import L2GD
    from collegium.algorithms.lcfed import LCFed
    from collegium.algorithms.local import Local
    from collegium.algorithms.modalityencoders import ModalityEncoders
    from collegium.algorithms.modalityfilters import ModalityFilters
    from collegium.algorithms.moon import Moon
    from collegium.algorithms.perfedavg import PerFedAvg
    from collegium.algorithms.pfedla import PFedLA
    from collegium.algorithms.pfedme import PFedMe
    from collegium.algorithms.pfednet import PFedNet
    from collegium.algorithms.pooled import Pooled
    from collegium.algorithms.resfim import ResFIM
    from collegium.algorithms.robust import Robust
    from collegium.algorithms.scaffold import Scaffold
    from collegium.algorithms.silobn import SiloBN
    from collegium.algorithms.superfed import SuPerFed
    from collegium.algorithms.ttt import TTT
    from collegium.core.algorithm import Algorithm, Client, Replies, Server, handler
    from collegium.core.dataset import Dataset, Example, TensorDataset
    from collegium.core.message import Message
    from collegium.core.settings import settings
    from collegium.core.tensors import Tensors, mean
    from collegium.data.phantoms import make_federation
    from collegium.data.site import EgressPolicy, Site
    from collegium.errors import CollegiumError
    from collegium.experiment.federation import open_sites
    from collegium.models.factory import build_model
    from collegium.runtime.federation import Federation
    from collegium.runtime.simulation import Simulated, simulate
    from collegium.tasks import ClassificationTask, SegmentationTask, SupervisedTask, Task
    from collegium.testing.conformance import check_algorithm
    from collegium.training.loop import TrainingConfig
    from collegium.training.privacy import PrivacyConfig

__version__ = "0.1.0"

_HOMES = {
    "adaptation.average": ("Average",),
    "adaptation.base": ("Adapter", "Sources"),
    "adaptation.dsbn": ("DSBN",),
    "adaptation.ensemble": ("Ensemble",),
    "adaptation.none": ("NoAdaptation",),
    "adaptation.outside": ("adapt_and_score",),
    "adaptation.routing": ("Routing",),
    "adaptation.tent": ("Tent",),
    "algorithms.apfl": ("APFL",),
    "algorithms.condist": ("ConDistFL",),
    "algorithms.distance": ("Distance",),
    "algorithms.ditto": ("Ditto",),
    "algorithms.fedadam": ("FedAdam",),
    "algorithms.fedamp": ("FedAMP",),
    "algorithms.fedas": ("FedAS",),
    "algorithms.fedavg": ("FedAvg",),
    "algorithms.fedavgm": ("FedAvgM",),
    "algorithms.fedavgp": ("FedAvgP",),
    "algorithms.fedawa": ("FedAWA",),
    "algorithms.fedbabu": ("FedBABU",),
    "algorithms.fedbn": ("FedBN",),
    "algorithms.feddf": ("FedDF",),
    "algorithms.feddg": ("FedDG",),
    "algorithms.fedevi": ("FedEvi",),
    "algorithms.fedlws": ("FedLWS",),
    "algorithms.fedmtl": ("FedMTL",),
    "algorithms.fednova": ("FedNova",),
    "algorithms.fedper": ("FedPer",),
    "algorithms.fedprox": ("FedProx",),
    "algorithms.fedrdn": ("FedRDN",),
    "algorithms.fedrep": ("FedRep",),
    "algorithms.fedrod": ("FedRoD",),
    "algorithms.fedyogi": ("FedYogi",),
    "algorithms.finetune": ("FineTune",),
    "algorithms.fml": ("FML",),
    "algorithms.fpfc": ("FPFC",),
    "algorithms.grace": ("Grace",),
    "algorithms.harmofl": ("HarmoFL",),
    "algorithms.ifca": ("IFCA",),
    "algorithms.iopfl": ("IOPFL",),
    "algorithms.l2gd": ("L2GD",),
    "algorithms.lcfed": ("LCFed",),
    "algorithms.local": ("Local",),
    "algorithms.modalityencoders": ("ModalityEncoders",),
    "algorithms.modalityfilters": ("ModalityFilters",),
    "algorithms.moon": ("Moon",),
    "algorithms.perfedavg": ("PerFedAvg",),
    "algorithms.pfedla": ("PFedLA",),
    "algorithms.pfedme": ("PFedMe",),
    "algorithms.pfednet": ("PFedNet",),
    "algorithms.pooled": ("Pooled",),
    "algorithms.resfim": ("ResFIM",),
    "algorithms.robust": ("Robust",),
    "algorithms.scaffold": ("Scaffold",),
    "algorithms.silobn": ("SiloBN",),
    "algorithms.superfed": ("SuPerFed",),
    "algorithms.ttt": ("TTT",),
    "core.algorithm": ("Algorithm", "Client", "Replies", "Server", "handler"),
    "core.dataset": ("Dataset", "Example", "TensorDataset"),
    "core.message": ("Message",),
    "core.settings": ("settings",),
    "core.tensors": ("Tensors", "mean"),
    "data.phantoms": ("make_federation",),
    "data.site": ("EgressPolicy", "Site"),
    "errors": ("CollegiumError",),
    "experiment.federation": ("open_sites",),
    "models.factory": ("build_model",),
    "runtime.federation": ("Federation",),
    "runtime.simulation": ("Simulated", "simulate"),
    "tasks": ("ClassificationTask", "SegmentationTask", "SupervisedTask", "Task"),
    "testing.conformance": ("check_algorithm",),
    "training.loop": ("TrainingConfig",),
    "training.privacy": ("PrivacyConfig",),
}
"""Where the public names live; each is imported at its first use: `--help` loads no torch."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "APFL",
    "DSBN",
    "FML",
    "FPFC",
    "IFCA",
    "IOPFL",
    "L2GD",
    "TTT",
    "Adapter",
    "Algorithm",
    "Average",
    "ClassificationTask",
    "Client",
    "CollegiumError",
    "ConDistFL",
    "Dataset",
    "Distance",
    "Ditto",
    "EgressPolicy",
    "Ensemble",
    "Example",
    "FedAMP",
    "FedAS",
    "FedAWA",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgP",
    "FedBABU",
    "FedBN",
    "FedDF",
    "FedDG",
    "FedEvi",
    "FedLWS",
    "FedMTL",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRDN",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "Federation",
    "FineTune",
    "Grace",
    "HarmoFL",
    "LCFed",
    "Local",
    "Message",
    "ModalityEncoders",
    "ModalityFilters",
    "Moon",
    "NoAdaptation",
    "PFedLA",
    "PFedMe",
    "PFedNet",
    "PerFedAvg",
    "Pooled",
    "PrivacyConfig",
    "Replies",
    "ResFIM",
    "Robust",
    "Routing",
    "Scaffold",
    "SegmentationTask",
    "Server",
    "SiloBN",
    "Simulated",
    "Site",
    "Sources",
    "SuPerFed",
    "SupervisedTask",
    "Task",
    "TensorDataset",
    "Tensors",
    "Tent",
    "TrainingConfig",
    "adapt_and_score",
    "build_model",
    "check_algorithm",
    "handler",
    "make_federation",
    "mean",
    "open_sites",
    "settings",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"collegium.{_HOME[name]}"), name)
    raise AttributeError(f"module 'collegium' has no attribute {name!r}")
