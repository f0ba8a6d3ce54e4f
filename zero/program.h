// A training step as a list of operations in issue order. Stages and tiers are not modes of the engine: they are different
// programs. The engine runs the list, the ledger sums its slots.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/dtype.h"

namespace ballast {

inline constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

enum class OpKind : std::uint8_t {
  clear,    // to = 0
  gather,   // to = every rank's `from`, one after another
  use,      // the trainer's turn: it reads `from` (parameters) and, in backward, writes `to` (gradients)
  release,  // `to` is no longer needed
  reduce,   // to += every rank's part of `from`
  norm,     // adds the squares of `from` to the step's norm
  agree,    // one norm for all ranks, and from it the decision how to update, or not to
  read,     // to = the tile's record
  update,   // the optimizer's step: gradient `from`, parameter `to`, and `state`
  write,    // the tile's record = from
  commit,   // everything written becomes current
};

// Over whom a collective goes: the ranks that share a unit's shards, or those that hold the same shard.
enum class Ranks : std::uint8_t { shard_group, replica_group };

enum class Phase : std::uint8_t { forward, backward, step };

std::string_view name(Phase phase);

// Elements of a slot (bytes, where the slot holds optimizer state).
struct Piece {
  std::size_t slot = none;
  std::size_t first = 0;
  std::size_t count = 0;
};

struct Op {
  OpKind kind;
  Phase phase = Phase::step;
  std::size_t unit = none;
  std::size_t tile = none;
  Ranks ranks = Ranks::shard_group;
  Piece from{};
  Piece to{};
  Piece state{};
  std::vector<std::size_t> after{};  // the earlier operations that this one waits for
};

// A buffer. Reusing one is a dependency in the list.
struct Slot {
  std::string name;
  DType dtype = DType::u8;
  std::size_t count = 0;  // elements

  std::size_t bytes() const { return count * byte_size(dtype); }
};

struct Program {
  std::vector<Slot> slots;
  std::vector<Op> ops;
  std::size_t micro_steps = 1;  // backward passes whose gradients one step sums
};

std::size_t memory_bytes(const Program& program);  // the ledger: what the engine will reserve
std::string to_text(const Program& program);       // one slot or operation a line

}  // namespace ballast
