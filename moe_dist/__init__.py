"""moe_dist: one mixture-of-experts layer over all backends, and a tuner whose ranks cannot disagree or hang.

Importing this loads neither triton nor a framework, and touches no device.
"""

from moe_dist.backends.base import Backend as Backend
from moe_dist.backends.base import MoEProblem as MoEProblem
from moe_dist.backends.reference import ReferenceConfig as ReferenceConfig
from moe_dist.backends.registry import explain_backends as explain_backends
from moe_dist.backends.registry import find_backends as find_backends
from moe_dist.backends.registry import request_backend as request_backend
from moe_dist.backends.torch_dense import TorchDenseConfig as TorchDenseConfig
from moe_dist.backends.torch_grouped import TorchGroupedConfig as TorchGroupedConfig
from moe_dist.backends.torch_loop import TorchLoopConfig as TorchLoopConfig
from moe_dist.config import ActivationConfig as ActivationConfig
from moe_dist.config import BackendConfig as BackendConfig
from moe_dist.config import BackendOptions as BackendOptions
from moe_dist.config import ExecutionConfig as ExecutionConfig
from moe_dist.config import ExpertConfig as ExpertConfig
from moe_dist.config import MoEConfig as MoEConfig
from moe_dist.config import ParallelConfig as ParallelConfig
from moe_dist.config import QuantConfig as QuantConfig
from moe_dist.config import RoutingConfig as RoutingConfig
from moe_dist.layer import MoELayer as MoELayer
from moe_dist.layer import moe_layer as moe_layer
from moe_dist.operation import MoEOperation as MoEOperation
from moe_dist.operation import make_random_weights as make_random_weights
from moe_dist.tensors import MoEActivationPack as MoEActivationPack
from moe_dist.tensors import MoEWeightPack as MoEWeightPack
