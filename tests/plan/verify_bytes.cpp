#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "kernels/exact_sum_math.h"
#include "tests/plan/verify.h"

namespace ballast {
namespace {

enum class Meaning : std::uint8_t {
  unknown,
  parameters,    // a unit's parameters
  state,         // the state of a unit's tiles
  no_gradients,  // zeros
  gradients,     // a unit's gradients, of one rank
  partial_sum,   // gradients summed over the shard group
  sum,           // gradients summed over all ranks
  moved_state,   // the state of a unit's tiles, with the momentum of the update that is to come
  // The directions in the shard of a unit, and in whole matrices at their home; before and after they are
  // orthogonalized.
  direction,
  orthogonal,
  matrices,
  orthogonal_matrices,
};

std::string_view name(Meaning meaning) {
  constexpr std::string_view names[] = {
      "nothing known", "parameters",           "state",    "cleared gradients",
      "gradients",     "partial sum",          "sum",      "state with its new momentum",
      "direction",     "orthogonal direction", "matrices", "orthogonal matrices"};
  return names[static_cast<std::size_t>(meaning)];
}

// The meaning of one byte. The bytes next to it differ in `offset` only.
struct Content {
  Meaning meaning = Meaning::unknown;
  std::size_t unit = none;
  std::size_t offset = 0;  // place in the parameters, state or gradients that it is part of
  // Parameters and state count updates so far, gradients the uses that are summed, and directions updates when they are
  // used.
  std::size_t version = 0;
  bool decoded = false;  // parameters that were gathered as codes

  Content at(std::size_t further) const {
    Content content = *this;
    if (meaning != Meaning::unknown) content.offset += further;
    return content;
  }
  bool operator==(const Content&) const = default;
};

std::string to_text(const Content& content) {
  if (content.meaning == Meaning::unknown) return std::string(name(content.meaning));
  return fmt::format("{} of unit {} from byte {}, version {}{}", name(content.meaning), content.unit, content.offset,
                     content.version, content.decoded ? ", decoded" : "");
}

// The meaning of the bytes of slots while a program is followed.
class Contents {
 public:
  explicit Contents(const std::vector<Slot>& slots) {
    for (const Slot& slot : slots) {
      slots_.push_back({{0, {.end = slot.bytes}}});
    }
  }

  void write(const Piece& piece, const Content& content) {
    if (piece.bytes == 0) return;
    Memory& memory = slots_[piece.slot];
    const auto end = split(memory, piece.end());
    memory.erase(split(memory, piece.begin), end);
    memory[piece.begin] = {piece.end(), content};
  }

  void copy(const Piece& from, const Piece& to) {
    for (const auto& [range, content] : parts(from)) {
      write(to.part(range.first - from.begin, range.count), content);
    }
  }

  // Whether a piece has this content from its first byte to its last. text() says what it has.
  bool is(const Piece& piece, const Content& content) const {
    return std::ranges::all_of(
        parts(piece), [&](const auto& part) { return part.second == content.at(part.first.first - piece.begin); });
  }

  std::string text(const Piece& piece) const {
    std::string text;
    for (const auto& [range, content] : parts(piece)) {
      text += (text.empty() ? "" : "; ") + to_text(content);
    }
    return text;
  }

  // Forgets what updates of a unit have left, wherever it is.
  void forget(std::size_t unit, std::size_t version) {
    for (Memory& memory : slots_) {
      for (auto& [begin, stretch] : memory) {
        const Content& is = stretch.content;
        const bool is_left = is.meaning == Meaning::parameters || is.meaning == Meaning::state;
        if (is_left && is.unit == unit && is.version == version) stretch.content = {};
      }
    }
  }

  Content first(const Piece& piece) const {
    const auto all = parts(piece);
    return all.empty() ? Content{} : all.front().second;
  }

 private:
  struct Stretch {
    std::size_t end = 0;
    Content content{};
  };
  using Memory = std::map<std::size_t, Stretch>;

  // The builder's history does the same. The code is not shared on purpose: a verifier that shares code with the compiler
  // shares its faults.
  Memory::iterator split(Memory& memory, std::size_t at) {
    const auto next = memory.lower_bound(at);
    if (next != memory.end() && next->first == at) return next;
    const auto before = std::prev(next);
    if (before->second.end <= at) return next;
    const Stretch rest{before->second.end, before->second.content.at(at - before->first)};
    before->second.end = at;
    return memory.emplace_hint(next, at, rest);
  }

  std::vector<std::pair<Range, Content>> parts(const Piece& piece) const {
    std::vector<std::pair<Range, Content>> parts;
    for (const auto& [begin, stretch] : slots_[piece.slot]) {
      const Range common = intersection({begin, stretch.end - begin}, {piece.begin, piece.bytes});
      if (common.count > 0) parts.push_back({common, stretch.content.at(common.first - begin)});
    }
    return parts;
  }

  std::vector<Memory> slots_;
};

// The contents that the bytes of a right program must have: the verifier's own knowledge, apart from the compiler's.
class ExpectedContent {
 public:
  ExpectedContent(const CompileInput& input, const Uses& uses) : in_(input), uses_(uses) {}

  std::size_t width(std::size_t unit) const { return in_.width(unit); }
  std::size_t width_of_sums(std::size_t unit) const { return in_.width_of_sums(unit); }
  const UnitLayout& layout(std::size_t unit) const { return in_.layout.units[unit]; }

  Content parameters(std::size_t unit, std::size_t first_element, std::size_t version) const {
    const bool frozen = first_element >= layout(unit).trained.count();
    return {Meaning::parameters, unit, first_element * width(unit), frozen ? 0 : version};
  }
  Content state(std::size_t unit, std::size_t tile, std::size_t version) const {
    const std::size_t before = tile == 0 ? 0 : in_.blocks.state_bytes_on_device(unit);
    return {Meaning::state, unit, before + tile * in_.blocks.of(unit).state, version};
  }
  Range tile_range(std::size_t unit, std::size_t tile) const {
    return layout(unit).tile_range(in_.rank_in_shard_group, tile);
  }
  // This rank's sum of all that a step's backward uses give.
  Content all_gradients(std::size_t unit, std::size_t from_element) const {
    return {Meaning::sum, unit, from_element * width_of_sums(unit), uses_.backward_visits(unit) * in_.micro_steps};
  }
  std::size_t direction_bytes(std::size_t unit) const { return layout(unit).trained.shard * byte_size(DType::bf16); }
  bool has_gradients(std::size_t unit) const {
    return uses_.backward_visits(unit) > 0 && layout(unit).trained.count() > 0;
  }

 private:
  const CompileInput& in_;
  const Uses& uses_;
};

// Follows every byte of a program through two steps, and compares what each operation finds with what it has to find.
class Follower {
 public:
  Follower(const CompileInput& input, const Program& program)
      : in_(input),
        program_(program),
        uses_(trace_of(input), input.model.units.size()),
        expected_(input, uses_),
        contents_(program.slots) {
    for (const UnitLayout& unit : input.layout.units) {
      updates_.emplace_back(unit.tiles.size(), 0);
    }
    for (const Home& home : program.homes) {
      fill(home);
    }
  }

  std::vector<std::string> run() {
    follow_all(program_.entry, "the entry");
    for (int step = 1; step <= 2; ++step) {
      step_ = {};
      follow_all(program_.ops, fmt::format("step {}", step));
      end_step();
    }
    return std::move(problems_);
  }

 private:
  template <class... Args>
  void complain(fmt::format_string<Args...> text, Args&&... args) {
    problems_.push_back(where_ + ": " + fmt::format(text, std::forward<Args>(args)...));
  }

  void expect(const Piece& piece, const Content& content) {
    if (!contents_.is(piece, content)) complain("needs {}, finds {}", to_text(content), contents_.text(piece));
  }

  // Trained parameters have another version than the frozen ones next to them.
  void expect_full(const Op& use, std::size_t version) {
    const UnitLayout& unit = expected_.layout(use.unit);
    const std::size_t width = expected_.width(use.unit);
    if (use.from.bytes != unit.elements() * width) complain("has {} bytes of unit {}", use.from.bytes, use.unit);
    for (const Section* section : {&unit.trained, &unit.frozen}) {
      if (section->count() == 0) continue;
      Content content = expected_.parameters(use.unit, section->first, version);
      content.decoded = in_.gathers_codes(use.unit) && section->shards > 1 && !use.exact;
      expect(use.from.part(section->first * width, section->count() * width), content);
    }
  }

  void fill(const Home& home) {
    const std::size_t trained = expected_.layout(home.unit).trained.count();
    const Range common = intersection(home.range, {0, trained});
    if (home.parameters.exists()) {
      contents_.write(home.parameters.part(0, common.count * expected_.width(home.unit)),
                      expected_.parameters(home.unit, home.range.first, 0));
      const std::size_t rest = home.range.count - common.count;
      contents_.write(
          home.parameters.part(common.count * expected_.width(home.unit), rest * expected_.width(home.unit)),
          expected_.parameters(home.unit, home.range.end() - rest, 0));
    }
    if (home.state.exists()) contents_.write(home.state, expected_.state(home.unit, home.tile, 0));
  }

  void follow_all(const std::vector<Op>& ops, const std::string& list) {
    const auto end = std::ranges::find(ops, OpKind::agree, &Op::kind);
    step_.is_undone = std::find_if(ops.begin(), end, [](const Op& op) { return op.kind == OpKind::abandon; }) != end;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      where_ = fmt::format("{} of {}, operation {}", name(ops[i].kind), list, i);
      follow(ops[i]);
    }
    where_ = list;
  }

  // Frozen tiles are read and uploaded; nothing else is done with them.
  static std::size_t tiles_of(const UnitLayout& unit, OpKind kind) {
    const bool is_read = kind == OpKind::read_first || kind == OpKind::upload;
    return unit.tiles.size() + (is_read ? unit.frozen_tiles.size() : 0);
  }

  bool exists(const Op& op) {
    const bool unit = op.unit == none || op.unit < in_.model.units.size();
    const bool tile = unit && (op.tile == none || (op.unit != none && op.tiles > 0 &&
                                                   op.tile + op.tiles <= tiles_of(expected_.layout(op.unit), op.kind)));
    if (!tile) complain("names unit {} tile {}, which the model does not have", op.unit, op.tile);
    return tile;
  }

  void follow(const Op& op) {
    if (!exists(op)) return;
    if (op.codes.exist()) contents_.write(op.codes.memory, {});
    switch (op.kind) {
      case OpKind::clear: return clear(op);
      case OpKind::read: return read(op, true);
      case OpKind::read_first: return read(op, false);
      case OpKind::upload:
      case OpKind::download:
      case OpKind::keep:
        if (op.from.bytes != op.to.bytes) complain("moves {} bytes to {}", op.from.bytes, op.to.bytes);
        return contents_.copy(op.from, op.to);
      case OpKind::gather: return gather(op);
      case OpKind::use: return use(op);
      case OpKind::reduce: reduce(op); return norm_of_sum(op);
      case OpKind::accumulate: accumulate(op); return norm_of_sum(op);
      case OpKind::norm: return norm(op.unit, op.first, op.from, op.to);
      case OpKind::agree: return agree(op);
      case OpKind::update: return update(op);
      case OpKind::momentum: return momentum(op);
      case OpKind::collect: return move_matrices(op, Meaning::direction, Meaning::matrices);
      case OpKind::orthogonalize: return orthogonalize(op);
      case OpKind::distribute: return move_matrices(op, Meaning::orthogonal_matrices, Meaning::orthogonal);
      case OpKind::write: return write(op);
      case OpKind::commit: return commit();
      case OpKind::abandon: return abandon();
      case OpKind::meet: return;
    }
  }

  // Clears gradients, or the sums of a norm that is made anew.
  void clear(const Op& op) {
    if (op.unit == none) step_.normed.erase(op.to.slot);
    if (op.unit != none) contents_.write(op.to, {Meaning::no_gradients, op.unit});
  }

  void read(const Op& op, bool full) {
    const std::size_t version = on_drive_[{op.unit, op.tile}];
    const bool frozen = expected_.layout(op.unit).is_frozen(op.tile);
    const BlockSizes sizes = in_.blocks.in_record(op.unit);
    const Range range = expected_.tile_range(op.unit, op.tile);
    const std::size_t bytes = range.count * expected_.width(op.unit);
    const Piece block = op.to.part(in_.blocks.records().payload, frozen ? bytes : sizes.bytes());
    contents_.write(op.to, {});
    if (frozen || sizes.parameter > 0) {
      contents_.write(block.part(0, bytes), expected_.parameters(op.unit, range.first, version));
    } else if (!full) {
      complain("reads the parameter alone of a record that has none");
    }
    if (full) contents_.write(block.part(sizes.parameter, sizes.state), expected_.state(op.unit, op.tile, version));
  }

  // All shards have the content of this rank's shard.
  void gather(const Op& op) {
    Content content = contents_.first(op.from);
    expect(op.from, content);
    const UnitLayout& unit = expected_.layout(op.unit);
    const bool frozen = content.offset >= unit.trained.count() * expected_.width(op.unit);
    const Section& section = frozen ? unit.frozen : unit.trained;
    const std::size_t width = expected_.width(op.unit);
    const bool is_shard_group =
        op.ranks == Ranks::shard_group;  // else a group's part, of which this rank has its shard
    const Range own = is_shard_group ? in_.kept_range(section) : section.shard_range(in_.rank_in_shard_group);
    const Range all = is_shard_group ? section.all() : in_.kept_range(section);
    if (content.meaning != Meaning::parameters || content.decoded || content.unit != op.unit ||
        content.offset != own.first * width || op.from.bytes != own.count * width || op.to.bytes != all.count * width) {
      complain("gathers {}", contents_.text(op.from));
    }
    content.offset = all.first * width;
    content.decoded = op.codes.exist();
    contents_.write(op.to, content);
  }

  void use(const Op& op) {
    const Visit& visit = uses_.trace()[step_.uses % uses_.trace().size()];
    if (visit.unit != op.unit || visit.phase != op.phase || visit.exact != op.exact)
      complain("is not the next visit of the trace");
    ++step_.uses;
    expect_full(op, version_now(op.unit));
    const bool trained = expected_.layout(op.unit).trained.count() > 0;
    if ((op.phase == Phase::backward && trained) != op.to.exists())
      complain("has gradients where the trace has none, or none where it has some");
    if (!op.to.exists()) return;
    if (op.to.bytes != expected_.layout(op.unit).trained.count() * expected_.width(op.unit))
      complain("has {} bytes of gradients", op.to.bytes);
    const bool adds = in_.placement.reduction == Reduction::boundary;
    const Content before = contents_.first(op.to);
    if (!(adds && before.meaning == Meaning::gradients)) expect(op.to, {Meaning::no_gradients, op.unit});
    contents_.write(op.to, {Meaning::gradients, op.unit, 0, before.version + 1});
  }

  // Sums gradients of all ranks. The sum counts once, however many ranks there are.
  void reduce(const Op& op) {
    const bool mesh = in_.placement.ranks_per_group() > 1 && in_.placement.groups() > 1;
    const Content from = contents_.first(op.from);
    expect(op.from, {op.ranks == Ranks::replica_group && mesh ? Meaning::partial_sum : Meaning::gradients, op.unit,
                     op.first * expected_.width(op.unit), from.version});
    const Meaning meaning = op.ranks == Ranks::shard_group && mesh ? Meaning::partial_sum : Meaning::sum;
    const bool is_partial = meaning == Meaning::partial_sum;
    const std::size_t width = is_partial ? sizeof(float) : expected_.width_of_sums(op.unit);
    const Section& trained = expected_.layout(op.unit).trained;
    const bool is_lone = in_.placement.ranks() == 1;  // may sum in parts
    const std::size_t shard = is_lone ? op.from.bytes / expected_.width(op.unit) : trained.shard;
    const std::size_t elements = is_partial ? in_.kept_range(trained).count : shard;
    if (!is_lone && op.first > 0) complain("sums a part of a shard");
    if (op.to.bytes != elements * width) complain("sums to {} bytes", op.to.bytes);
    if (op.from == op.to && in_.placement.ranks() > 1) complain("sums gradients of several ranks in place");
    if (in_.placement.reduction == Reduction::each) contents_.write(op.from, {});  // can be summed once only
    contents_.write(op.to, {meaning, op.unit, op.first * width, from.version});
  }

  void accumulate(const Op& op) {
    const Content from = contents_.first(op.from);
    const Content to = contents_.first(op.to);
    const bool is_reduced = op.value_bytes == 0;  // a lone rank has nothing to reduce
    if (!is_reduced && in_.placement.ranks() > 1) complain("adds gradients that are not reduced");
    const std::size_t width = is_reduced ? expected_.width_of_sums(op.unit) : op.value_bytes;
    const std::size_t first = op.first * expected_.width_of_sums(op.unit);
    expect(op.from, {is_reduced ? Meaning::sum : Meaning::gradients, op.unit, op.first * width, from.version});
    expect(op.to, {Meaning::sum, op.unit, first, to.version});
    if (op.sum != to.version) complain("adds sum {} to {} of them", op.sum, to.version);
    contents_.write(op.to, {Meaning::sum, op.unit, first, from.version + to.version});
    contents_.write(op.from, {});
  }

  // Notes the sum. It counts at the agreement, because sums may be cleared and made anew before.
  void norm(std::size_t unit, std::size_t first, const Piece& from, const Piece& to) {
    if (step_.agreed) complain("comes after the agreement");
    if (to.bytes != sizeof(kernels::ExactSum)) complain("has {} bytes to sum in", to.bytes);
    const bool complete = contents_.is(from, expected_.all_gradients(unit, first));
    const Range range{first, from.bytes / expected_.width_of_sums(unit)};
    step_.normed[to.slot].push_back({unit, range, complete ? std::string() : contents_.text(from)});
  }

  // A sum over ranks has no norm in its pass, nor has one of tensors that another rank counts.
  void norm_of_sum(const Op& op) {
    if (!op.state.exists()) return;
    if (op.kind == OpKind::reduce && in_.placement.ranks() > 1) complain("takes the norm of what ranks exchange");
    if (!std::ranges::all_of(in_.model.units[op.unit].tensors, &Tensor::counted))
      complain("takes the norm of tensors that another rank counts");
    norm(op.unit, op.first, op.to, op.state);
  }

  void agree(const Op& op) {
    step_.agreed = true;
    std::vector<std::size_t> normed(updates_.size());  // elements of each unit, up to which all are in the norm
    for (const Piece* sums : {&op.to, &op.state}) {
      for (const auto& [unit, range, instead] : step_.normed[sums->slot]) {
        if (range.first != normed[unit]) complain("unit {} is in the norm from element {} on", unit, range.first);
        normed[unit] = range.end();
        if (!instead.empty())
          complain("needs a norm of {}, has one of {}", to_text(expected_.all_gradients(unit, range.first)), instead);
      }
    }
    for (std::size_t unit = 0; unit < updates_.size(); ++unit) {
      const std::size_t needed = expected_.has_gradients(unit) ? expected_.layout(unit).trained.shard : 0;
      if (normed[unit] != needed) complain("{} elements of unit {} are in the norm", normed[unit], unit);
    }
  }

  // An update before the agreement may turn out to be wrong. Then the record of the last step, which is whole and still there, brings
  // the old values back, but not to a trainer that keeps the parameters in sight.
  void expect_agreed(const Op& op) {
    if (step_.agreed || in_.schedule.update_in_backward) return;
    const bool can_be_undone = in_.full_records && in_.schedule.most_repeats > 0 && !in_.placement.full_parameters &&
                               op.kind == OpKind::update && is_on_drive(op.unit, op.tile);
    if (!can_be_undone) complain("comes before the agreement");
  }

  bool is_on_drive(std::size_t unit, std::size_t tile) const {
    return std::ranges::any_of(program_.homes, [&](const Home& home) {
      return home.on_drive && !home.frozen && home.unit == unit && home.tile == tile;
    });
  }

  // Directions that belong to an update, from a byte of the rank's shard on.
  Content update_content(Meaning meaning, const Op& op, std::size_t from_element = 0) const {
    const std::vector<std::size_t>& updates = updates_[op.unit];
    const std::size_t version = updates.at(op.tile == none ? 0 : op.tile) + 1;
    return {meaning, op.unit, from_element * byte_size(DType::bf16), version};
  }

  // The elements of an operation's tiles, relative to the rank's shard.
  Range elements_of(const Op& op) const {
    Range range = expected_.layout(op.unit).tiles[op.tile];
    for (std::size_t i = 1; i < op.tiles; ++i)
      range.count += expected_.layout(op.unit).tiles[op.tile + i].count;
    return range;
  }

  // Finds the state of each tile of an operation with its updates so far, and leaves it with more.
  void change_state(const Op& op, Meaning before, Meaning after, std::size_t more) {
    const std::size_t bytes = op.state.bytes / op.tiles;
    for (std::size_t i = 0; i < op.tiles; ++i) {
      Content state = expected_.state(op.unit, op.tile + i, updates_[op.unit][op.tile + i]);
      state.meaning = before;
      expect(op.state.part(i * bytes, bytes), state);
      state.meaning = after;
      state.version += more;
      contents_.write(op.state.part(i * bytes, bytes), state);
    }
  }

  void momentum(const Op& op) {
    const auto [first, count] = elements_of(op);
    expect_agreed(op);
    if (op.from.bytes != count * expected_.width_of_sums(op.unit) || op.to.bytes != count * byte_size(DType::bf16)) {
      complain("makes {} bytes of directions from {}", op.to.bytes, op.from.bytes);
    }
    expect(op.from, expected_.all_gradients(op.unit, first));
    change_state(op, Meaning::state, Meaning::moved_state, 0);
    contents_.write(op.to, update_content(Meaning::direction, op, first));
  }

  // Brings whole matrices to their homes, or back: all of this rank's shard of them.
  void move_matrices(const Op& op, Meaning from, Meaning to) {
    expect_agreed(op);
    const Piece& shard = from == Meaning::direction ? op.from : op.to;
    if (shard.bytes != expected_.direction_bytes(op.unit)) complain("moves {} bytes of the shard", shard.bytes);
    expect(op.from, update_content(from, op));
    contents_.write(op.to, update_content(to, op));
  }

  // The directions are the matrices if there is one rank.
  void orthogonalize(const Op& op) {
    expect_agreed(op);
    const bool is_alone = in_.placement.shards == 1;
    expect(op.to, update_content(is_alone ? Meaning::direction : Meaning::matrices, op));
    contents_.write(op.to, update_content(is_alone ? Meaning::orthogonal : Meaning::orthogonal_matrices, op));
    contents_.write(op.state, {});
  }

  void update(const Op& op) {
    const auto [first, count] = elements_of(op);
    const std::size_t first_in_unit = expected_.tile_range(op.unit, op.tile).first;
    Content from =
        in_.needs_matrices() ? update_content(Meaning::orthogonal, op, first) : expected_.all_gradients(op.unit, first);
    if (step_.is_undone && !step_.abandoned) from.version = contents_.first(op.from).version;  // more may follow
    const std::size_t width = in_.needs_matrices() ? byte_size(DType::bf16) : expected_.width_of_sums(op.unit);
    const std::size_t version = updates_[op.unit][op.tile];
    expect_agreed(op);
    if (op.from.bytes != count * width || op.to.bytes != count * expected_.width(op.unit)) {
      complain("updates {} bytes with {}", op.to.bytes, op.from.bytes);
    }
    expect(op.from, from);
    expect(op.to, expected_.parameters(op.unit, first_in_unit, version));
    change_state(op, in_.needs_matrices() ? Meaning::moved_state : Meaning::state, Meaning::state, 1);
    contents_.write(op.to, expected_.parameters(op.unit, first_in_unit, version + 1));
    for (std::size_t i = 0; i < op.tiles; ++i)
      ++updates_[op.unit][op.tile + i];
  }

  void write(const Op& op) {
    const Range range = expected_.tile_range(op.unit, op.tile);
    const std::size_t version = updates_[op.unit][op.tile];
    const BlockSizes sizes = in_.blocks.in_record(op.unit);
    const Piece block = op.from.part(in_.blocks.records().payload, sizes.bytes());
    if (sizes.parameter > 0) {
      expect(block.part(0, range.count * expected_.width(op.unit)),
             expected_.parameters(op.unit, range.first, version));
    }
    expect(block.part(sizes.parameter, sizes.state), expected_.state(op.unit, op.tile, version));
    if (!step_.written.insert({op.unit, op.tile}).second) complain("writes a tile twice");
    on_drive_[{op.unit, op.tile}] = version;
  }

  void commit() {
    step_.committed = true;
    committed_ = on_drive_;
    for (const Home& home : program_.homes) {
      if (home.on_drive && !home.frozen && !step_.written.contains({home.unit, home.tile})) {
        complain("unit {} tile {} has no write", home.unit, home.tile);
      }
    }
  }

  // The tiles whose records are dropped have the updates of the last commit. What the other ones left has wrong values.
  void abandon() {
    for (const auto& [unit, tile] : step_.written) {
      if (updates_[unit][tile] > committed_[{unit, tile}]) contents_.forget(unit, updates_[unit][tile]);
      updates_[unit][tile] = committed_[{unit, tile}];
    }
    on_drive_ = committed_;
    step_.written.clear();
    step_.abandoned = true;
  }

  // Returns how many updates a unit's parameters should have at the beginning of the next step.
  std::size_t version_now(std::size_t unit) const { return uses_.backward_visits(unit) > 0 ? steps_done_ : 0; }

  void end_step() {
    if (!step_.abandoned || step_.committed || !step_.agreed) ++steps_done_;  // else it is skipped
    if (step_.uses != uses_.trace().size() * in_.micro_steps) complain("the trainer gets {} uses", step_.uses);
    if (!step_.agreed) complain("has no agreement");
    if (!step_.committed && !step_.written.empty()) complain("does not commit what it wrote");
    for (std::size_t unit = 0; unit < updates_.size(); ++unit) {
      for (const std::size_t updates : updates_[unit]) {
        if (updates != version_now(unit)) complain("a tile of unit {} has {} updates", unit, updates);
      }
    }
    for (const Home& home : program_.homes) {
      if (!home.parameters.exists()) continue;
      const Range trained = intersection(home.range, {0, expected_.layout(home.unit).trained.count()});
      expect(home.parameters.part(0, trained.count * expected_.width(home.unit)),
             expected_.parameters(home.unit, home.range.first, version_now(home.unit)));
    }
  }

  using TileName = std::pair<std::size_t, std::size_t>;
  struct Normed {
    std::size_t unit;
    Range range;          // of the rank's shard
    std::string instead;  // what was summed, if it was not all of the unit's gradients
  };
  struct Step {
    std::size_t uses = 0;
    bool agreed = false;
    bool committed = false;
    bool is_undone = false;  // what it updates before the agreement is dropped before that
    bool abandoned = false;
    std::set<TileName> written{};
    std::map<std::size_t, std::vector<Normed>> normed{};  // the key is the slot
  };

  const CompileInput& in_;
  const Program& program_;
  Uses uses_;
  ExpectedContent expected_;
  Contents contents_;
  std::vector<std::vector<std::size_t>> updates_;  // one for each unit and tile
  std::map<TileName, std::size_t> on_drive_;       // versions
  std::map<TileName, std::size_t> committed_;      // versions of the last commit
  std::size_t steps_done_ = 0;
  Step step_;  // the one that is being followed
  std::string where_;
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> wrong_bytes(const CompileInput& input, const Program& program) {
  return Follower(input, program).run();
}

std::vector<std::string> verify(const CompileInput& input, const Program& program) {
  std::vector<std::string> problems = wrong_order(program);
  const std::vector<std::string> bytes = wrong_bytes(input, program);
  problems.insert(problems.end(), bytes.begin(), bytes.end());
  return problems;
}

}  // namespace ballast
