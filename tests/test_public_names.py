"""The public surface: adding or losing a name is a decision, made here."""

import moe_dist

NAMES = """
ActivationConfig Backend BackendConfig BackendOptions BoundLayer Bucket BucketLadder CallsDiffer ComponentTimes ConfigError DeviceLost ExecutionConfig
ExpertConfig GroupError InputError MeasurementPolicy MoEActivationPack MoEConfig MoEDistError MoELayer MoEOperation MoEProblem MoERepro
MoEWeightPack NothingRunnable ParallelConfig PassAborted PassReport ProbeSpec QuantConfig RankLost RankWithdrawn ReferenceConfig
RendezvousLost RoutingConfig SettingsDiffer StoreError Tactic Timed TorchDenseConfig TorchGroupedConfig TorchLoopConfig TritonConfig Tuner
TunerStateError TuningError UnsupportedBackend Workspace autotune benchmark benchmark_all explain_backends find_backends
make_random_weights moe_layer request_backend
"""


def test_public_names() -> None:
    own = {name for name, value in vars(moe_dist).items() if not name.startswith("_") and type(value).__name__ != "module"}
    assert own == set(NAMES.split())
