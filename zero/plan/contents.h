// The meaning of the bytes of slots while the verifier follows a program.
#pragma once

#include <map>

#include "zero/plan/program.h"

namespace ballast {

enum class Meaning : std::uint8_t {
  unknown,
  parameters,    // of a unit
  state,         // of a unit's tiles
  no_gradients,  // zeros
  gradients,     // of a unit, of one rank
  partial_sum,   // of gradients over the shard group
  sum,           // of gradients over all ranks
  moved_state,   // of a unit's tiles, with the momentum of the update that is to come
  // Of the shard of a unit, and of whole matrices at their home; before and after they are orthogonalized.
  direction,
  orthogonal,
  matrices,
  orthogonal_matrices,
};

std::string_view name(Meaning meaning);

// The meaning of one byte. The bytes next to it differ in `offset` only.
struct Content {
  Meaning meaning = Meaning::unknown;
  std::size_t unit = none;
  std::size_t offset = 0;  // in the parameters, state or gradients that it is part of
  // Of parameters and state: updates so far. Of gradients: how many uses are summed. Of directions: updates when they are used.
  std::size_t version = 0;
  bool decoded = false;  // of parameters: gathered as codes

  Content at(std::size_t further) const;
  bool operator==(const Content&) const = default;
};

std::string to_text(const Content& content);

class Contents {
 public:
  explicit Contents(const std::vector<Slot>& slots);

  void write(const Piece& piece, const Content& content);
  void copy(const Piece& from, const Piece& to);

  // Whether a piece has this content from its first byte to its last. text() says what it has.
  bool is(const Piece& piece, const Content& content) const;
  std::string text(const Piece& piece) const;
  Content first(const Piece& piece) const;

 private:
  struct Stretch {
    std::size_t end = 0;
    Content content{};
  };
  using Memory = std::map<std::size_t, Stretch>;

  Memory::iterator split(Memory& memory, std::size_t at);
  std::vector<std::pair<Range, Content>> parts(const Piece& piece) const;

  std::vector<Memory> slots_;
};

}  // namespace ballast
