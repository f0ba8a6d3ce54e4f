// A training step as a list of operations in issue order. Stages and tiers are not modes of the engine: they are
// different programs. The engine runs the list, the simulator costs it, the ledger sums its slots.
#pragma once

#include <ballast/placement.h>
#include <ballast/schedule.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/plan/layout.h"

namespace ballast {

enum class OpKind : std::uint8_t {
  clear,       // sets `to` to 0
  read,        // `to` = the tile's record
  read_first,  // `to` = the record's first region, the parameter
  upload,      // `to` = `from`: copies a host's bytes to the device
  gather,  // `to` = the `from` of every rank, one after another; in the lane of uploads, of host memory that ranks share
  use,     // the trainer reads `from` (parameters) and, in backward, adds to `to` (gradients)
  reduce,  // `to` = the sum over the ranks of `from`: this rank's part of it, or all; in the lane of the host, there
  accumulate,  // `to` += `from`. Like a lone rank's reduction it may take the norm of `to`, in the same pass: `state`
  download,    // `to` = `from`: copies the device's bytes to the host
  keep,        // `to` = `from`: copies on the host
  norm,        // `to` += the squares of `from`, exactly
  agree,       // one norm from the `to` and `state` of all ranks, which become 0; it decides how to update, or not to
  update,      // the optimizer's step: gradient `from`, parameter `to`, and `state`
  // A rule of whole matrices updates in these five, of which the last is the update: its `from` is the direction.
  momentum,       // gradient `from`, direction `to`, and `state`
  collect,        // `to` = this rank's matrices, whole, of the `from` of all ranks
  orthogonalize,  // the matrices in `to`, with the memory `state`
  distribute,     // `to` = this rank's shard of the matrices in the `from` of all ranks
  write,          // the tile's record = from
  commit,         // all records that were written become current
  abandon,        // all records that were written are dropped: those of the last commit are current again
  meet,           // fails unless all ranks are off plan in the same way
};

bool is_of_drives(Lane lane);
bool done_in_order(Lane lane);  // whether an operation's end implies the end of all before it in its lane

// The ranks of a collective: those that have the shards of one copy, or those that hold the same shard.
enum class Ranks : std::uint8_t { shard_group, replica_group };

// The shards of one copy of a unit with several parts are those of one part.
inline std::size_t count_of(Ranks ranks, const Placement& placement, std::size_t parts = 1) {
  return ranks == Ranks::shard_group ? placement.ranks_per_group() / parts : placement.groups();
}

std::string_view name(OpKind kind);

// Bytes of a slot.
struct Piece {
  std::size_t slot = none;
  std::size_t begin = 0;
  std::size_t bytes = 0;

  bool exists() const { return slot != none; }
  std::size_t end() const { return begin + bytes; }
  Piece part(std::size_t from, std::size_t count) const { return {slot, begin + from, count}; }
  bool operator==(const Piece&) const = default;
};

inline bool overlap(const Piece& a, const Piece& b) {
  return a.exists() && a.slot == b.slot && a.begin < b.end() && b.begin < a.end();
}

// An earlier operation that one waits for: of the same step, or of the step before.
struct Wait {
  std::uint32_t op = 0;
  bool is_last_steps = false;

  bool operator==(const Wait&) const = default;
};

// The encoding of a collective, and the memory that it encodes in. Without memory the collective is exact.
struct Codes {
  Piece memory{};
  std::size_t received = 0;               // bytes, from all other ranks
  WireFormat values = WireFormat::exact;  // the format of each rank's values
  WireFormat sums = WireFormat::exact;    // the format of sums of several ranks

  bool exist() const { return memory.exists(); }
  bool operator==(const Codes&) const = default;
};

struct Op {
  OpKind kind;
  Lane lane = Lane::compute;
  Phase phase = Phase::step;
  std::size_t unit = none;
  std::size_t tile = none;
  std::size_t tiles = 1;  // momentum, update and their copies: so many, one after another, from `tile` on
  Ranks ranks = Ranks::shard_group;
  std::size_t parts = 1;        // gather and reduce: the unit's
  std::size_t first = 0;        // reduce, accumulate and norm of a part of the rank's shard: its first element
  std::size_t sum = 0;          // accumulate and reduce: how many sums of the unit came before in its step
  std::size_t value_bytes = 0;  // reduce: bytes of each value in `from`
  double operations = 0;        // orthogonalize: additions and multiplications, on the rank with the most
  Piece from{};
  Piece to{};
  Piece state{};
  Codes codes{};              // the codes of a gather or a reduction
  bool exact = false;         // a use's Visit::exact
  std::vector<Wait> after{};  // waits in addition to those that its lane's order implies
  bool is_marked = false;     // its end is marked in a stream, even if no operation waits for it
};

// Whether ranks reach each other's `from` in host memory: devices gather from there, and the host sums.
inline bool passes_host(const Op& op) {
  return (op.kind == OpKind::gather && op.lane == Lane::upload) || (op.kind == OpKind::reduce && op.lane == Lane::host);
}

// Whether an operation adds the squares of gradients to a norm: `norm`, or a sum that takes its norm.
inline bool takes_norm(const Op& op) {
  return op.kind == OpKind::norm || ((op.kind == OpKind::reduce || op.kind == OpKind::accumulate) && op.state.exists());
}

// The purpose of a slot. Code finds slots by their role; their names are for display.
enum class SlotRole : std::uint8_t {
  parameters,       // a unit's parameters: full, or this rank's shard of them
  frozen,           // this rank's shard of a unit's frozen parameters, on the host
  gradients,        // a unit's gradients, of this rank alone
  reduced,          // this rank's shard of a unit's summed gradients
  state,            // the state of a unit's tiles, on the device
  blocks,           // parameters and state of a unit's tiles, on the host
  gathered,         // full parameters of units that are gathered on demand
  norm,             // the exact sum of squares of a tier's gradients
  partial,          // gradients that are summed over the shard group, not yet over the replicas: in fp32
  arriving,         // summed gradients on their way to their tier
  landed,           // the same, on the host
  unsummed,         // gradients of this rank alone, on the host
  tile_gradients,   // gradients of one tile, for an update on the host
  tile_parameters,  // parameters of one tile, the same
  tile_directions,  // directions of one tile, for or after an update on the host
  visitors,         // state of tiles on the host, on the device while it updates them, and what else that needs
  directions,       // this rank's shard of what a rule of whole matrices orthogonalizes
  matrices,         // whole ones of a unit, on their way
  workspace,        // memory for the products of matrices
  first_regions,    // the first regions of records
  staging,          // records on their way to and from a drive
  kept,             // records that stay in memory
  mirror,           // records of another rank on their way to a drive of this one
  gather_codes,     // encoded parameters of all ranks
  reduce_codes,     // encoded gradients that this rank sends, and sums of all ranks
  received,         // gradients of other ranks on a GPU, until they are added
  host_sums,        // the same: sums of each host's ranks, on their way to other hosts
};

std::string_view name(SlotRole role);

// A buffer. Reusing one is a dependency in the list.
struct Slot {
  SlotRole role = SlotRole::parameters;
  std::string name;  // "gradients.1": the role's, and which of them
  Tier tier = Tier::device;
  std::size_t bytes = 0;

  bool operator==(const Slot&) const = default;
};

// Where a stretch of a unit's parameters, or a tile's state, is kept between steps. Bytes that are kept twice have two
// homes.
struct Home {
  std::size_t unit = 0;
  std::size_t tile = none;  // none: a stretch that is no tile
  Range range{};            // elements of the unit
  Piece parameters{};
  Piece state{};
  bool on_drive = false;  // the tile's record holds the state, and the parameter if records do
  bool frozen = false;    // a tile of frozen parameters, which has no state: a record that is only read
};

// Runs once a step.
struct Program {
  std::vector<Slot> slots;
  std::vector<Home> homes;
  std::vector<Op> entry;  // runs once, before the first step: gathers and reads what every step expects to find
  std::vector<Op> ops;
};

// Which ends of operations a GPU has to mark with an event. By operation: whether another lane waits for its end, in this step or
// in the next, or it is the last of its lane, whose end is the end of all. The list is a whole program's, because steps wait for
// each other.
std::vector<bool> awaited_in(const std::vector<Op>& list);

std::string to_text(const Program& program);          // one slot or operation a line
std::string label(const Op& op, const Model& model);  // "update h.3 tile 2"

}  // namespace ballast
