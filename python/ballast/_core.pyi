"""The types of the C++ library, as python/bindings/ binds them."""

import enum
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Final, NoReturn, TypedDict

from ballast.store import Store

version: str

def error_codes() -> list[tuple[str, str, str, str]]: ...
def fail(*, name: str, problem: Problem, file: str, line: int) -> NoReturn: ...

class Problem:
    def __init__(self, *, what: str, where: str = "", needed: str = "", available: str = "", remedy: str = "") -> None: ...

def parse_bytes(text: str) -> int: ...
def human_bytes(bytes: int) -> str: ...

class DType(enum.Enum):
    fp32 = 0
    bf16 = 1
    fp16 = 2
    u8 = 3

class Tier(enum.Enum):
    device = 0
    host = 1
    nvme = 2

class Phase(enum.Enum):
    forward = 0
    backward = 1
    step = 2

class Lane(enum.Enum):
    compute = 0
    gather = 1
    reduce = 2
    upload = 3
    download = 4
    update = 5
    host = 6
    disk = 7
    fetch = 8

StateFormat = enum.Enum("StateFormat", {"fp32": 0, "split": 1, "bf16": 2, "compact": 3, "4bit": 4})

class GradientFormat(enum.Enum):
    fp32 = 0
    bf16 = 1

class WireFormat(enum.Enum):
    exact = 0
    int8 = 1
    int4 = 2

class Reduction(enum.Enum):
    each = 0
    boundary = 1

class Tensor:
    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        *,
        group: int = 0,
        frozen: bool = False,
        counted: bool = True,
        number: int | None = None,
        blocks: Sequence[int] = ...,
    ) -> None: ...
    name: Final[str]
    shape: Final[list[int]]
    group: Final[int]
    frozen: Final[bool]
    counted: Final[bool]
    number: Final[int | None]
    blocks: Final[list[int]]
    elements: Final[int]

class Tie:
    def __init__(self, name: str, *, unit: int, tensor: int) -> None: ...
    name: Final[str]
    unit: Final[int]
    tensor: Final[int]

class Unit:
    def __init__(self, name: str, *, dtype: DType, tensors: Sequence[Tensor], ties: Sequence[Tie] = ...) -> None: ...
    name: Final[str]
    dtype: Final[DType]
    tensors: Final[list[Tensor]]
    ties: Final[list[Tie]]

class Model:
    def __init__(self, units: Sequence[Unit]) -> None: ...
    units: Final[list[Unit]]

class Visit:
    def __init__(self, unit: int, phase: Phase) -> None: ...

def visits(model: Model, unit: int, phase: Phase) -> list[Visit]: ...

class Spread:
    def __init__(self, *, device: float = 0.0, host: float = 0.0, nvme: float = 0.0) -> None: ...
    device: Final[float]
    host: Final[float]
    nvme: Final[float]

def all_in(tier: Tier) -> Spread: ...

class Placement:
    reduction: Reduction
    parameters: Spread
    gradients: Spread
    state: Spread
    parameter_replicas: int
    shards: Final[int]
    replicas: Final[int]
    full_parameters: Final[bool]
    def check(self) -> None: ...

def placement_of_stage(stage: int, ranks: int) -> Placement: ...

class Wire:
    gather: WireFormat
    reduce: WireFormat
    across: WireFormat | None
    def __init__(self) -> None: ...
    def check(self, placement: Placement) -> None: ...

class Machine:
    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    ranks_per_host: int
    gather: float
    reduce: float
    across: float
    upload: float
    download: float
    read: float
    write: float
    device_memory: float
    host_memory: float
    products: float
    shares_cores: bool
    host_is_device: bool
    def __init__(self) -> None: ...
    def __copy__(self) -> Machine: ...

class LedgerEntry:
    tier: Final[Tier]
    owner: Final[str]
    bytes: Final[int]

class Simulation:
    seconds: Final[float]
    exposed: Final[dict[str, float]]
    busy: Final[dict[str, float]]
    critical: Final[dict[str, float]]
    bytes: Final[dict[str, int]]

class Choice:
    placement: Final[Placement]
    ledger: Final[list[LedgerEntry]]
    simulation: Final[Simulation]

class TimelineEntry:
    lane: Final[Lane]
    phase: Final[Phase]
    kind: Final[str]
    unit: Final[str]
    of_earlier_step: Final[bool]
    begin: Final[float]
    end: Final[float]

def optimizers() -> list[str]: ...

class _StepOptions:
    parameter_replicas: int
    format: StateFormat
    gradient_format: GradientFormat
    tile_elements: int
    wire: Wire
    prefetch: int
    gathered_bytes: int
    update_in_backward: bool
    overlap_gathers: bool
    trace: Sequence[Visit]

class Question(_StepOptions):
    model: Final[Model]
    stage: int | None
    ranks: int
    micro_steps: int
    full_records: bool
    def __init__(self, model: Model, machine: Machine) -> None: ...
    def set_optimizer(self, name: str) -> None: ...
    def set_rule(self, rule: _Rule) -> None: ...
    def set_other(self, other: Question) -> None: ...
    def set_activations(self, tier: Tier, bytes: Sequence[int]) -> None: ...
    def set_work(self, seconds: Sequence[tuple[float, float]]) -> None: ...
    def choose(self) -> Choice: ...
    def price(self, placement: Placement) -> Choice: ...
    def placements(self) -> list[Placement]: ...
    def memory(self, placement: Placement) -> list[LedgerEntry]: ...
    def needs(self, placement: Placement) -> dict[str, int]: ...
    def kept_elements(self, placement: Placement, *, rank: int) -> list[list[int]]: ...
    def program(self, placement: Placement, *, rank: int = 0) -> str: ...
    def timeline(self, placement: Placement) -> list[TimelineEntry]: ...

class GpuFound(TypedDict):
    name: str
    pci: str
    memory_bytes: int
    compute_capability: tuple[int, int]

class CgroupFound(TypedDict):
    limit_bytes: int
    available_bytes: int
    file: str

class MemoryFound(TypedDict):
    total_bytes: int
    available_bytes: int
    memlock_bytes: int | None
    address_space_bytes: int | None
    cgroup: CgroupFound | None

class MachineFound(TypedDict):
    cpu: str
    cores: int
    cores_of_host: int
    core_quota: float | None
    numa_nodes: int
    instruction_set: str
    memory: MemoryFound
    gpus: list[GpuFound]
    no_gpu_because: str
    no_nccl_because: str

def this_machine(*, root: str = "/") -> MachineFound: ...

class DriveFound(TypedDict):
    file_system: str
    is_network: bool
    free_bytes: int
    buffered_because: str
    queue: str
    read: float
    write: float
    both: float

def inspect_drive(directory: str, *, bytes: int) -> DriveFound: ...
def require_io_uring() -> None: ...
def begin_exit() -> None: ...
def launched_rank() -> int: ...
def machine_name() -> str: ...

class Rendezvous:
    def __init__(
        self,
        *,
        store: Store | None,
        rank: int | None,
        size: int | None,
        host: str,
        job: str,
        timeout: float | None,
    ) -> None: ...

class Group:
    def __init__(self, where: Rendezvous) -> None: ...
    rank: Final[int]
    size: Final[int]
    def barrier(self) -> None: ...
    def all_reduce(self, values: Sequence[int]) -> list[int]: ...
    def sum(self, mine: int, *, into: int, count: int, format: WireFormat = ..., step: int = 0, number: int = 0) -> None: ...
    @property
    def sent_bytes(self) -> tuple[int, int]: ...
    def from_all(self, mine: bytes) -> list[bytes]: ...
    def broadcast(self, *, address: int, bytes: int, root: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    @property
    def failed_ranks(self) -> list[int]: ...
    def leave(self) -> None: ...
    def fail(self, words: str) -> None: ...
    def close(self) -> None: ...

class AdamW:
    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None: ...

class Adam:
    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None: ...

class Sgd:
    def __init__(self, *, lr: float, weight_decay: float, maximize: bool = False) -> None: ...

class SgdMomentum:
    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None: ...

class Lion:
    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool = False) -> None: ...

class Adagrad:
    def __init__(self, *, lr: float, lr_decay: float, weight_decay: float, eps: float, maximize: bool = False) -> None: ...

class Muon:
    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        ns_coefficients: Sequence[float],
        ns_steps: int,
        eps: float,
        matches_adamw: bool = False,
        polar_express: bool = False,
    ) -> None: ...

MAX_CUSTOM_VALUES: int
MAX_NOTE_BYTES: int

class External:
    def __init__(self, *, custom_values: int = 0) -> None: ...

_Rule = AdamW | Adam | Sgd | SgdMomentum | Lion | Adagrad | Muon | External

def check_rule(rule: _Rule) -> None: ...
def state_names(rule: _Rule) -> tuple[str, str]: ...

class Memory:
    address: Final[int]
    bytes: Final[int]
    gpu: Final[int | None]
    def dlpack(self, dtype: DType, first: int, count: int) -> object: ...

class JointRound:
    def __init__(self, start: int = 0, number: int = 0, members: int = 0) -> None: ...

class RunPoint:
    def __init__(self) -> None: ...

class RunCommit:
    step: int

def commits_of_run(group: Group, directories: list[str], run: str) -> list[RunCommit]: ...
def newest_joint_points(runs: list[list[RunCommit]], names: list[str]) -> list[RunPoint] | None: ...

class ExchangeOrder:
    def __init__(self) -> None: ...

class TrainingOptions(_StepOptions):
    stage: int
    parameters: Spread
    gradients: Spread
    state: Spread
    threads: int
    gpu: int | None
    stream: int
    keeps_timeline: bool
    exchanges: ExchangeOrder | None
    verify: int
    directories: Sequence[str | PathLike[str]]
    run: str
    mirror: bool
    begins_again: bool
    resume_at: RunPoint | None
    def __init__(self) -> None: ...
    def set_join_notes(self, join: Callable[[list[bytes], list[int]], bytes]) -> None: ...
    def set_before_write(self, before: Callable[[bool], None]) -> None: ...

class StepMetrics(TypedDict):
    seconds: float
    on_demand: int
    verified: int
    bytes: dict[str, int]
    busy: dict[str, float]
    stalls: dict[str, float]
    exposed: dict[str, float]
    timed: bool
    sent_inside: int
    sent_across: int
    memory: dict[str, int]

class StragglerFound(TypedDict):
    slowest: int
    seconds: float
    median: float
    least: float

class StepResult:
    skipped: Final[bool]
    norm: Final[float]
    step: Final[int]
    reason: Final[str]
    metrics: Final[StepMetrics]
    straggler: Final[StragglerFound | None]

class Moment(enum.Enum):
    momentum = 0
    variance = 1
    custom_0 = 2
    custom_1 = 3
    custom_2 = 4
    custom_3 = 5
    custom_4 = 6
    custom_5 = 7
    custom_6 = 8
    custom_7 = 9

class TileToUpdate:
    unit: Final[int]
    first: Final[int]
    gradients: Final[Memory]
    gradient_dtype: Final[DType]
    count: Final[int]
    masters: Final[Memory]
    own: Final[list[Memory]]

class Training:
    def __init__(
        self,
        *,
        model: Model,
        group: Group,
        norm_group: Group | None,
        rules: Sequence[_Rule],
        options: TrainingOptions,
    ) -> None: ...
    def take_log(self) -> list[tuple[int, str]]: ...
    @property
    def found(self) -> bool: ...
    @property
    def lost(self) -> tuple[str, int] | None: ...
    def start(self, fill: Callable[[int, int, int, int, int], bool]) -> None: ...
    @property
    def steps(self) -> int: ...
    def set_note(self, note: bytes) -> None: ...
    def note(self) -> bytes: ...
    def tensor_begins(self, unit: int) -> list[int]: ...
    def full_parameters(self, unit: int) -> Memory: ...
    def acquire_parameters(self, unit: int) -> Memory: ...
    def acquire_exact_parameters(self, unit: int) -> Memory: ...
    @property
    def gathers_codes(self) -> bool: ...
    def acquire_gradients(self, unit: int) -> Memory: ...
    @property
    def unpinned_because(self) -> str: ...
    def release(self) -> None: ...
    def prepare(
        self,
        *,
        rules: Sequence[_Rule],
        missed: Sequence[int],
    ) -> None: ...
    def leave_out(self, unit: int, tensor: int) -> None: ...
    def gradient_norm(self, *, loss_scale: float) -> float: ...
    def tensor_norms(self, *, loss_scale: float) -> list[list[float]]: ...
    def visit_gradients(self, visit: Callable[[int, int, Memory, DType], None]) -> None: ...
    def step(
        self,
        *,
        rules: Sequence[_Rule],
        missed: Sequence[int],
        max_norm: float,
        loss_scale: float,
        discard: bool,
        custom_step: Callable[[list[TileToUpdate], float, bool], None] | None = None,
    ) -> StepResult: ...
    def step_prepared(self) -> StepResult: ...
    def wait_for_parameters(self, unit: int) -> None: ...
    def wait_for_commit(self) -> None: ...
    def finish(self) -> None: ...
    def offload(self, *, parameters: bool, agree: Callable[[bool], None]) -> None: ...
    def reload(self, *, agree: Callable[[bool], None]) -> None: ...
    def keep_gathered(self, bytes: int, *, agree: Callable[[bool], None]) -> None: ...
    @property
    def gathered_bytes(self) -> int: ...
    def parts(self, unit: int, tensor: int) -> list[tuple[int, int]]: ...
    def read_moment(self, unit: int, tensor: int, moment: Moment, *, into: int) -> None: ...
    def write_moments(self, address_of: Callable[[int, int, Moment], int]) -> None: ...
    def take_full_parameters(self, written: set[tuple[int, int]]) -> None: ...
    def parameters_changed(self) -> None: ...
    def write_parameters(self, fill: Callable[[int, int, int, int, int], bool]) -> None: ...
    def kind(self, unit: int) -> ChunkKind: ...
    def local_shards(self) -> list[StatePart]: ...
    def visit_shards(self, visit: Callable[[StatePart], None]) -> None: ...
    def change_shards(self, change: Callable[[StatePart], None], agree: Callable[[], None]) -> None: ...
    def set_steps(self, steps: int) -> None: ...
    @property
    def committed(self) -> RunPoint: ...
    def set_round(self, round: JointRound) -> None: ...
    def ledger(self, own_state: tuple[Tier, int]) -> str: ...
    def chrome_trace(self) -> str: ...

class ChunkKind:
    def __init__(self, *, parameter: DType, format: StateFormat | None, momentum: bool, variance: bool) -> None: ...
    parameter: Final[DType]
    format: Final[StateFormat | None]
    momentum: Final[bool]
    variance: Final[bool]
    def bytes(self, elements: int) -> int: ...

class StatePart:
    def __init__(
        self,
        *,
        dtype: DType,
        parameter: int,
        momentum: int = 0,
        variance: int = 0,
        own: tuple[int, int, int] = (0, 0, 0),
        count: int,
    ) -> None: ...
    unit: Final[int]
    tensor: Final[int]
    first: Final[int]
    count: Final[int]
    frozen: Final[bool]
    def copy_from(self, part: StatePart) -> None: ...
    def copy_parameter_from(self, part: StatePart) -> None: ...
    def own(self, number: int) -> Memory: ...

class RecordedRun:
    def __init__(self, directory: str, name: str) -> None: ...
    @property
    def step(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def rule(self) -> str: ...
    @property
    def moments(self) -> dict[str, str]: ...
    def note(self) -> bytes: ...
    def tensors(self) -> list[tuple[str, list[int]]]: ...
    def copy(self, tensor: str, first: int, into: StatePart) -> None: ...

def runs_in(directory: str) -> list[str]: ...

class Snapshot:
    def __init__(self, sizes: Sequence[int], *, threads: int) -> None: ...
    def append(self, part: StatePart) -> None: ...
    def append_memory(self, address: int, bytes: int) -> None: ...
    def release(self) -> None: ...
    def has_sizes(self, sizes: Sequence[int]) -> bool: ...
    bytes: Final[int]

class CheckpointWriter:
    def __init__(self, path: str) -> None: ...
    def append(self, part: StatePart) -> tuple[int, int]: ...
    def append_memory(self, address: int, bytes: int) -> tuple[int, int]: ...
    def append_chunk(self, snapshot: Snapshot, number: int) -> tuple[int, int]: ...
    def finish(self) -> int: ...

class CheckpointReader:
    def __init__(self, files: Sequence[str], in_order: Sequence[tuple[int, int, int, int]]) -> None: ...
    def next(self) -> None: ...
    def memory(self) -> Memory: ...
    def copy(self, kind: ChunkKind, elements: tuple[int, int, int, int], to: StatePart) -> None: ...

class Completion:
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def order(self, stream: int, gpu: int) -> None: ...

class ActivationCounters(TypedDict):
    saved_bytes: int
    loaded_bytes: int
    written_bytes: int
    read_bytes: int
    kept_bytes: int
    host_bytes: int
    drive_bytes: int
    waited_seconds: float

class ActivationStore:
    def __init__(self, *, directory: str, memory_bytes: int, gpu: int | None) -> None: ...
    def save(self, address: int, bytes: int, stream: int) -> tuple[int, Completion]: ...
    def load(self, ticket: int, address: int, bytes: int, stream: int) -> Completion: ...
    def is_in_memory(self, ticket: int) -> bool: ...
    def drop(self, ticket: int) -> None: ...
    def counters(self) -> ActivationCounters: ...

def require_run_name(run: str) -> None: ...
def require_run_on_drives(run: str, *, state: Spread) -> None: ...

class DirectoryLock:
    def __init__(self, *, directory: str) -> None: ...
    def release(self) -> None: ...

def checksum(bytes: bytes | memoryview) -> int: ...
