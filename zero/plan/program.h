// A training step as a list of operations in issue order. Stages and tiers are not modes of the engine: they are different
// programs. The engine runs the list, the simulator costs it, the ledger sums its slots.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "zero/plan/placement.h"

namespace ballast {

inline constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

enum class OpKind : std::uint8_t {
  clear,       // to = 0
  read,        // to = the tile's record
  read_first,  // to = the record's first region, the parameter
  upload,      // to = from: a host's bytes to the device
  gather,      // to = every rank's `from`, one after another
  use,         // the trainer's turn: it reads `from` (parameters) and, in backward, adds to `to` (gradients)
  reduce,      // to = the sum over the ranks of `from`, in fp32: this rank's part of it, or all
  accumulate,  // to += from, in fp32
  download,    // to = from: the device's bytes to the host
  keep,        // to = from: on the host
  norm,        // to += the squares of `from`, exactly
  agree,       // one norm of all ranks' `to` and `state`, which become 0; from it the decision how to update, or not to
  update,      // the optimizer's step: gradient `from`, parameter `to`, and `state`
  write,       // the tile's record = from
  commit,      // everything written becomes current
  meet,        // all ranks have left the program's order in the same way; else it fails
};

// An ordered queue of work, which goes on beside the others. `compute` is the trainer's own; `host` computes in host memory,
// `disk` and `fetch` are the drives', and all others work on the device. All are done in order, except that those of the
// drives have many requests in flight. `fetch` reads parameters for the trainer, past the updates that `disk` has to do.
enum class Lane : std::uint8_t { compute, gather, reduce, upload, download, update, host, disk, fetch };
inline constexpr std::size_t lane_count = 9;

bool is_of_drives(Lane lane);

// Over whom a collective goes: the ranks that share a unit's shards, or those that hold the same shard.
enum class Ranks : std::uint8_t { shard_group, replica_group };

enum class Phase : std::uint8_t { forward, backward, step };

std::string_view name(OpKind kind);
std::string_view name(Lane lane);
std::string_view name(Phase phase);

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

// An earlier operation that one waits for: of the same round of the program, or of the one before.
struct Wait {
  std::uint32_t op = 0;
  bool of_last_round = false;

  bool operator==(const Wait&) const = default;
};

struct Op {
  OpKind kind;
  Lane lane = Lane::compute;
  Phase phase = Phase::step;
  std::size_t unit = none;
  std::size_t tile = none;
  Ranks ranks = Ranks::shard_group;
  Piece from{};
  Piece to{};
  Piece state{};
  std::vector<Wait> after{};  // beside those that its lane's order implies
};

// What a slot is for, where code has to know it. Most slots are buffers that operations use in turn.
enum class SlotRole : std::uint8_t { buffer, gathered, reduced };

// A buffer. Reusing one is a dependency in the list.
struct Slot {
  std::string name;  // "gradients.1": what it is for, and which of them
  Tier tier = Tier::device;
  std::size_t bytes = 0;
  SlotRole role = SlotRole::buffer;  // gathered: whole units that come and go; reduced: a unit's summed gradients

  bool operator==(const Slot&) const = default;
};

// Where a stretch of a unit's parameters, or a tile's state, lies between steps. What lies in several places has several.
struct Home {
  std::size_t unit = 0;
  std::size_t tile = none;  // none: a stretch that is no tile
  Range range{};            // elements of the unit
  Piece parameters{};
  Piece state{};
  bool on_drive = false;  // in the tile's record: the state, and the parameter if records hold it
};

// Runs round after round; a round is one step.
struct Program {
  std::vector<Slot> slots;
  std::vector<Home> homes;
  std::vector<Op> entry;  // once, before the first round: what every round finds gathered and read
  std::vector<Op> ops;
};

std::string to_text(const Program& program);          // one slot or operation a line
std::string label(const Op& op, const Model& model);  // "update h.3 tile 2"

}  // namespace ballast
