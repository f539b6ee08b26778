"""OpenMM as an engine. OpenMM itself is imported only when it is asked for: it is an optional extra."""

from __future__ import annotations

from pathlib import Path

from mdcampaign.engines.base import Capabilities, Iterations
from mdcampaign.jobs import MDJob, Outcome, Slot

MISSING = "OpenMM cannot be imported ({}). Install it: pip install 'mdcampaign[openmm]', or conda's openmm."


class OpenMMEngine:
    """Langevin dynamics with verified checkpoints, and frames that are counted once."""

    def probe(self) -> Capabilities:
        """Return OpenMM's version and platforms; says in `problem` why there is none. Never raises."""
        try:
            import openmm

            from mdcampaign.engines.openmm_system import platforms

            found = platforms()
            failures = "; ".join(openmm.Platform.getPluginLoadFailures())
            return Capabilities(
                "openmm",
                version=openmm.Platform.getOpenMMVersion(),
                platforms=found,
                gpu=any(name in found for name in ("CUDA", "HIP", "OpenCL")),
                facts={"build": openmm.version.git_revision, **({"plugin_failures": failures} if failures else {})},
            )
        except Exception as exc:  # a broken installation raises anything at all
            return Capabilities("openmm", problem=MISSING.format(exc))

    def run(self, job: MDJob, slot: Slot, workdir: Path) -> Iterations:
        """Run the job; see `mdcampaign.engines.base.Engine`."""
        try:
            from mdcampaign.engines.openmm_run import Run
        except ImportError as exc:
            return Outcome("failed", failure="engine", target_step=job.steps, message=MISSING.format(exc))
        return (yield from Run(job, slot, workdir).iterate())
