"""The configuration with which Parsl's own tests run on SlotExecutor: its `htex_local.py` with the class changed."""

from parsl.config import Config
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider

from mdcampaign.executor import SlotExecutor


def fresh_config():
    return Config(
        executors=[
            SlotExecutor(
                label="slots_local",
                loopback_address="::1",
                worker_debug=True,
                cores_per_worker=1,
                encrypted=True,
                provider=LocalProvider(init_blocks=1, max_blocks=1, launcher=SimpleLauncher()),
            )
        ],
        strategy="none",
    )
