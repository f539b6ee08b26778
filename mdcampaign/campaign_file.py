"""The campaign file: what to run, in YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from mdcampaign.errors import BadCampaignFile
from mdcampaign.jobs import NAME, complaint, refused

Loc = tuple[int | str, ...]


class _Block(BaseModel):
    """Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ExecutorSettings(_Block):
    """The executor: by itself on this machine, or a Parsl configuration in a file of its own.

    What is left out has the default of `SlotExecutor` or `Policy`.
    """

    config: str | None = Field(
        default=None, description="Python file that exports a Parsl Config named `config`; used alone"
    )
    slots_per_device: PositiveInt | None = Field(default=None, description="slots that each device is divided into")
    devices_per_node: PositiveInt | None = Field(default=None, description="declared number of devices of a node")
    device_memory_mb: PositiveInt | None = Field(default=None, description="declared memory of a device, MiB")
    cores_per_worker: PositiveFloat | None = Field(
        default=None, description="CPU cores of a slot on a node without GPUs"
    )
    max_workers_per_node: PositiveInt | None = Field(default=None, description="most slots on a node without GPUs")
    aging: NonNegativeFloat | None = Field(default=None, description="levels of priority gained by a second of waiting")
    place: Literal["spread", "pack"] | None = Field(default=None, description="emptiest device first, or fullest")
    tail: bool | None = Field(
        default=None, description="start the longest waiting job early where the end would wait for it"
    )
    tail_fraction: PositiveFloat | None = Field(
        default=None, description="the tail rule acts at this fraction of work left"
    )
    preempt_gap: PositiveFloat | None = Field(
        default=None, description="levels by which a job must outrank one to displace it"
    )
    min_runtime_s: NonNegativeFloat | None = Field(
        default=None, description="no job is displaced sooner after its start, s"
    )
    max_preemptions: NonNegativeInt | None = Field(default=None, description="no job is displaced more often")

    def policy(self) -> dict[str, Any]:
        """Return the arguments for `scheduling.Policy` that are given."""
        return self.model_dump(include=set(POLICY_KEYS), exclude_none=True)

    def executor(self) -> dict[str, Any]:
        """Return the arguments for `SlotExecutor` that are given, without its policy."""
        return self.model_dump(exclude={*POLICY_KEYS, "config"}, exclude_none=True)


POLICY_KEYS = ("aging", "place", "tail", "tail_fraction", "preempt_gap", "min_runtime_s", "max_preemptions")


class Redis(_Block):
    """Where Colmena's Redis server is."""

    host: str = "localhost"
    port: int = Field(default=6379, ge=1, le=65535)


class CampaignFile(_Block):
    """A campaign. Made by `load_campaign_file`, which makes its paths absolute."""

    name: str = Field(pattern=NAME, description="names the campaign's directory")
    directory: Path = Field(
        Path(), strict=False, description="campaign directory, relative to where it is started; campaigns/NAME"
    )
    thinker: str = Field(pattern=r"^.+\.py:[A-Za-z_]\w*$", description="FILE.py:CLASS, relative to the campaign file")
    parameters: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the Thinker")
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    queues: Literal["pipe", "redis"] = Field("pipe", description="what carries Colmena's messages")
    redis: Redis = Field(default_factory=Redis)

    @property
    def thinker_file(self) -> Path:
        """The Python file of the Thinker."""
        return Path(self.thinker.rpartition(":")[0])

    @property
    def thinker_class(self) -> str:
        """The name of the Thinker's class in its file."""
        return self.thinker.rpartition(":")[2]

    def as_yaml(self) -> str:
        """Return the campaign as it is run, to be kept as `campaign.yaml`; what was left out stays left out."""
        return str(
            yaml.safe_dump(self.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
        )


def load_campaign_file(path: Path) -> CampaignFile:
    """Read and check a campaign file.

    `thinker` and `executor.config` are relative to the file, `directory` to the current directory.

    Raises:
        BadCampaignFile: it cannot be read, is no YAML, has an unknown key, an ill-typed value or a file that is not
            there; names the key path, the value, the line and the mend.
    """
    root, data = _parse(path)
    try:
        file = CampaignFile.model_validate(data)
    except ValidationError as exc:
        error = refused(exc, CampaignFile, BadCampaignFile)
        line = _line_of(root, complaint(exc)["loc"])
        mend = _MENDS.get(error.field, error.mend)
        raise BadCampaignFile(error.field, error.value, f"{error.problem} ({path}, line {line})", mend) from None
    if "redis" in data and file.queues != "redis":
        where = f"{path}, line {_line_of(root, ('redis',))}"
        raise BadCampaignFile("redis", data["redis"], f"is of no use without it ({where})", "Add `queues: redis`.")
    update = _resolved(path, file, root)
    return file.model_copy(update=update)


_MENDS = {"thinker": "Give FILE.py:CLASS, the file relative to the campaign file."}


_UNSAFE = re.compile(r"""[\s'"\\$;&|<>()*?\[\]{}!#`]""")


def _resolved(path: Path, file: CampaignFile, root: yaml.Node) -> dict[str, Any]:
    """Return the fields that hold paths, absolute; the files must be there."""

    def existing(key: Loc, value: str) -> Path:
        found = (path.absolute().parent / Path(value).expanduser()).resolve()
        if not found.is_file():
            problem = f"no such file ({path}, line {_line_of(root, key)})"
            mend = f"It is looked for as {found}."
            raise BadCampaignFile(".".join(map(str, key)), value, problem, mend)
        return found

    directory = file.directory if "directory" in file.model_fields_set else Path("campaigns") / file.name
    directory = directory.expanduser().absolute()
    if unsafe := sorted(set(_UNSAFE.findall(str(directory)))):
        problem = f"Parsl's shell scripts cannot take {' '.join(map(repr, unsafe))} in a path"
        raise BadCampaignFile("directory", str(directory), problem, "Give a directory without, or start elsewhere.")
    update: dict[str, Any] = {
        "directory": directory,
        "thinker": f"{existing(('thinker',), str(file.thinker_file))}:{file.thinker_class}",
    }
    if file.executor.config is not None:
        config = existing(("executor", "config"), file.executor.config)
        if more := sorted(file.executor.model_fields_set - {"config"}):
            problem = f"cannot stand beside config ({path}, line {_line_of(root, ('executor', more[0]))})"
            mend = "Set it on the SlotExecutor in that file."
            raise BadCampaignFile(f"executor.{more[0]}", getattr(file.executor, more[0]), problem, mend)
        update["executor"] = file.executor.model_copy(update={"config": str(config)})
    return update


def _parse(path: Path) -> tuple[yaml.Node, dict[str, Any]]:
    """Return the nodes of a YAML file, which know their lines, and its data."""
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as exc:
        raise BadCampaignFile("campaign file", str(path), exc.strerror or str(exc)) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise BadCampaignFile("campaign file", str(path), f"no YAML: {' '.join(str(exc).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        mend = "It begins with `name: ...`."
        raise BadCampaignFile("campaign file", str(path), "has no keys", mend)
    for key, line in _repeated(root):
        raise BadCampaignFile(key, key, f"key is given twice ({path}, line {line})", "Remove one.")
    return root, data


def _repeated(node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Return the keys that occur twice in one mapping, with the line of the second; YAML would take it silently."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                yield str(key.value), key.start_mark.line + 1
            seen.add(str(key.value))
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)


def _line_of(node: yaml.Node, loc: Loc) -> int:
    """Return the line of the key at `loc`, or of the nearest thing around it."""
    line: int = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
    return line
