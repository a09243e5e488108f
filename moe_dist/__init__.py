"""moe_dist: one mixture-of-experts layer over all backends, and a tuner whose ranks cannot disagree or hang.

Importing this loads neither triton nor a framework, and touches no device.
"""

from moe_dist.backends.base import Backend as Backend
from moe_dist.backends.base import BoundLayer as BoundLayer
from moe_dist.backends.base import MoEProblem as MoEProblem
from moe_dist.backends.reference import ReferenceConfig as ReferenceConfig
from moe_dist.backends.registry import explain_backends as explain_backends
from moe_dist.backends.registry import find_backends as find_backends
from moe_dist.backends.registry import request_backend as request_backend
from moe_dist.backends.torch_dense import TorchDenseConfig as TorchDenseConfig
from moe_dist.backends.torch_grouped import TorchGroupedConfig as TorchGroupedConfig
from moe_dist.backends.torch_loop import TorchLoopConfig as TorchLoopConfig
from moe_dist.backends.triton import TritonConfig as TritonConfig
from moe_dist.config import ActivationConfig as ActivationConfig
from moe_dist.config import BackendConfig as BackendConfig
from moe_dist.config import BackendOptions as BackendOptions
from moe_dist.config import ExecutionConfig as ExecutionConfig
from moe_dist.config import ExpertConfig as ExpertConfig
from moe_dist.config import MoEConfig as MoEConfig
from moe_dist.config import ParallelConfig as ParallelConfig
from moe_dist.config import QuantConfig as QuantConfig
from moe_dist.config import RoutingConfig as RoutingConfig
from moe_dist.errors import ConfigError as ConfigError
from moe_dist.errors import DeviceLost as DeviceLost
from moe_dist.errors import GroupError as GroupError
from moe_dist.errors import InputError as InputError
from moe_dist.errors import MoEDistError as MoEDistError
from moe_dist.errors import NothingRunnable as NothingRunnable
from moe_dist.errors import PassAborted as PassAborted
from moe_dist.errors import RankLost as RankLost
from moe_dist.errors import RankWithdrawn as RankWithdrawn
from moe_dist.errors import RendezvousLost as RendezvousLost
from moe_dist.errors import SettingsDiffer as SettingsDiffer
from moe_dist.errors import StoreError as StoreError
from moe_dist.errors import TunerStateError as TunerStateError
from moe_dist.errors import TuningError as TuningError
from moe_dist.errors import UnsupportedBackend as UnsupportedBackend
from moe_dist.layer import MoELayer as MoELayer
from moe_dist.layer import moe_layer as moe_layer
from moe_dist.operation import MoEOperation as MoEOperation
from moe_dist.operation import make_random_weights as make_random_weights
from moe_dist.tensors import MoEActivationPack as MoEActivationPack
from moe_dist.tensors import MoEWeightPack as MoEWeightPack
from moe_dist.tuning.context import autotune as autotune
from moe_dist.tuning.policy import MeasurementPolicy as MeasurementPolicy
from moe_dist.tuning.problem import Bucket as Bucket
from moe_dist.tuning.problem import BucketLadder as BucketLadder
from moe_dist.tuning.problem import ProbeSpec as ProbeSpec
from moe_dist.tuning.problem import Tactic as Tactic
from moe_dist.tuning.problem import Workspace as Workspace
from moe_dist.tuning.tuner import PassReport as PassReport
from moe_dist.tuning.tuner import Tuner as Tuner
