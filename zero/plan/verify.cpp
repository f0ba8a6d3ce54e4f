#include "zero/plan/verify.h"

#include <fmt/format.h>

#include <map>
#include <set>

#include "kernels/exact_sum_math.h"
#include "zero/plan/contents.h"
#include "zero/plan/verify_order.h"

namespace ballast {
namespace {

class Follower {
 public:
  Follower(const CompileInput& input, const Program& program)
      : in_(input),
        program_(program),
        trace_(trace_of(input)),
        uses_(trace_, input.model.units.size()),
        contents_(program.slots),
        updates_(input.model.units.size()) {}

  std::vector<std::string> run() {
    for (std::size_t unit = 0; unit < updates_.size(); ++unit) {
      updates_[unit].assign(in_.layout.units[unit].tiles.size(), 0);
    }
    for (const Home& home : program_.homes)
      fill(home);
    follow_all(program_.entry, "the entry");
    for (int round = 1; round <= 2; ++round) {
      used_ = 0;
      agreed_ = committed_ = false;
      normed_.clear();
      written_.clear();
      follow_all(program_.ops, fmt::format("round {}", round));
      end_of_round(static_cast<std::size_t>(round));
    }
    return std::move(problems_);
  }

 private:
  template <class... Args>
  void complain(fmt::format_string<Args...> text, Args&&... args) {
    problems_.push_back(where_ + ": " + fmt::format(text, std::forward<Args>(args)...));
  }

  std::size_t width(std::size_t unit) const { return byte_size(in_.model.units[unit].dtype); }
  const UnitLayout& layout(std::size_t unit) const { return in_.layout.units[unit]; }

  Content parameters(std::size_t unit, std::size_t first_element, std::size_t version) const {
    const bool frozen = first_element >= layout(unit).trained.count();
    return {Meaning::parameters, unit, first_element * width(unit), frozen ? 0 : version};
  }
  Content state(std::size_t unit, std::size_t tile, std::size_t version) const {
    return {Meaning::state, unit, tile * in_.blocks.of(unit).state, version};
  }
  Range of_tile(std::size_t unit, std::size_t tile) const {
    const auto [first, count] = layout(unit).tiles[tile];
    return {layout(unit).trained.of_rank(in_.rank_in_shard_group).first + first, count};
  }

  void expect(const Piece& piece, const Content& content) {
    if (!contents_.is(piece, content)) complain("needs {}, finds {}", to_text(content), contents_.text(piece));
  }

  // Whole parameters have a version of their own beside the frozen ones.
  void expect_whole(const Piece& piece, std::size_t unit, std::size_t version) {
    const std::size_t trained = layout(unit).trained.count() * width(unit);
    if (piece.bytes != layout(unit).elements() * width(unit)) complain("has {} bytes of unit {}", piece.bytes, unit);
    if (trained > 0) expect(piece.part(0, trained), parameters(unit, 0, version));
    if (piece.bytes > trained) {
      expect(piece.part(trained, piece.bytes - trained), parameters(unit, layout(unit).trained.count(), 0));
    }
  }

  void fill(const Home& home) {
    const std::size_t trained = layout(home.unit).trained.count();
    const Range common = intersection(home.range, {0, trained});
    if (home.parameters.exists()) {
      contents_.write(home.parameters.part(0, common.count * width(home.unit)),
                      parameters(home.unit, home.range.first, 0));
      const std::size_t rest = home.range.count - common.count;
      contents_.write(home.parameters.part(common.count * width(home.unit), rest * width(home.unit)),
                      parameters(home.unit, home.range.end() - rest, 0));
    }
    if (home.state.exists()) contents_.write(home.state, state(home.unit, home.tile, 0));
  }

  void follow_all(const std::vector<Op>& ops, const std::string& round) {
    for (std::size_t i = 0; i < ops.size(); ++i) {
      where_ = fmt::format("{} of {}, operation {}", name(ops[i].kind), round, i);
      follow(ops[i]);
    }
    where_ = round;
  }

  bool exists(const Op& op) {
    const bool unit = op.unit == none || op.unit < in_.model.units.size();
    const bool tile = unit && (op.tile == none || (op.unit != none && op.tile < layout(op.unit).tiles.size()));
    if (!tile) complain("names unit {} tile {}, which the model has not", op.unit, op.tile);
    return tile;
  }

  void follow(const Op& op) {
    if (!exists(op)) return;
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
      case OpKind::reduce: return reduce(op);
      case OpKind::accumulate: return accumulate(op);
      case OpKind::norm: return norm(op);
      case OpKind::agree: return agree(op);
      case OpKind::update: return update(op);
      case OpKind::write: return write(op);
      case OpKind::commit: committed_ = true; return commit();
      case OpKind::meet: return;
    }
  }

  // Gradients, or the sums of a norm that has to be made anew.
  void clear(const Op& op) {
    if (op.unit == none) normed_.erase(op.to.slot);
    if (op.unit != none) contents_.write(op.to, {Meaning::no_gradients, op.unit});
  }

  void read(const Op& op, bool whole) {
    const std::size_t version = on_drive_[{op.unit, op.tile}];
    const BlockSizes sizes = in_.blocks.in_record(op.unit);
    const Piece block = op.to.part(in_.blocks.records().payload, sizes.bytes());
    const Range range = of_tile(op.unit, op.tile);
    contents_.write(op.to, {});
    if (sizes.parameter > 0) {
      contents_.write(block.part(0, range.count * width(op.unit)), parameters(op.unit, range.first, version));
    } else if (!whole) {
      complain("reads the parameter alone of a record that has none");
    }
    if (whole) contents_.write(block.part(sizes.parameter, sizes.state), state(op.unit, op.tile, version));
  }

  // Its own shard's content, for all shards.
  void gather(const Op& op) {
    Content content = contents_.first(op.from);
    expect(op.from, content);
    const UnitLayout& unit = layout(op.unit);
    const bool frozen = content.offset >= unit.trained.count() * width(op.unit);
    const Section& section = frozen ? unit.frozen : unit.trained;
    const std::size_t own = section.of_rank(in_.rank_in_shard_group).first * width(op.unit);
    if (content.meaning != Meaning::parameters || content.unit != op.unit || content.offset != own ||
        op.from.bytes * section.shards != op.to.bytes) {
      complain("gathers {}", contents_.text(op.from));
    }
    content.offset = section.first * width(op.unit);
    contents_.write(op.to, content);
  }

  void use(const Op& op) {
    const Visit& visit = trace_[used_ % trace_.size()];
    if (visit.unit != op.unit || visit.phase != op.phase) complain("is not what the trace has next");
    ++used_;
    expect_whole(op.from, op.unit, round_version(op.unit));
    const bool trained = layout(op.unit).trained.count() > 0;
    if ((op.phase == Phase::backward && trained) != op.to.exists())
      complain("has gradients, or has none, against the trace");
    if (!op.to.exists()) return;
    if (op.to.bytes != layout(op.unit).trained.count() * width(op.unit))
      complain("has {} bytes of gradients", op.to.bytes);
    const bool adds = in_.placement.reduction == Reduction::boundary;
    const Content before = contents_.first(op.to);
    if (!(adds && before.meaning == Meaning::gradients)) expect(op.to, {Meaning::no_gradients, op.unit});
    contents_.write(op.to, {Meaning::gradients, op.unit, 0, before.version + 1});
  }

  // Every rank's gradients come together here, so what is summed counts once however many ranks there are.
  void reduce(const Op& op) {
    const bool mesh = in_.placement.shards > 1 && in_.placement.replicas > 1;
    const Content from = contents_.first(op.from);
    expect(op.from, {op.ranks == Ranks::replica_group && mesh ? Meaning::partial_sum : Meaning::gradients, op.unit, 0,
                     from.version});
    if (op.to.bytes != layout(op.unit).trained.shard * sizeof(float)) complain("sums to {} bytes", op.to.bytes);
    const Meaning meaning = op.ranks == Ranks::shard_group && mesh ? Meaning::partial_sum : Meaning::sum;
    contents_.write(op.to, {meaning, op.unit, 0, from.version});
    if (in_.placement.reduction == Reduction::each) contents_.write(op.from, {});  // once
  }

  void accumulate(const Op& op) {
    const Content from = contents_.first(op.from);
    const Content to = contents_.first(op.to);
    expect(op.from, {Meaning::sum, op.unit, 0, from.version});
    expect(op.to, {Meaning::sum, op.unit, 0, to.version});
    contents_.write(op.to, {Meaning::sum, op.unit, 0, from.version + to.version});
    contents_.write(op.from, {});
  }

  Content all_gradients(std::size_t unit, std::size_t from_element) const {
    return {Meaning::sum, unit, from_element * sizeof(float), uses_.backward_visits(unit) * in_.micro_steps};
  }

  // Counts at the agreement: sums may be cleared and made anew before.
  void norm(const Op& op) {
    if (agreed_) complain("comes after the agreement");
    if (op.to.bytes != sizeof(kernels::ExactSum)) complain("has {} bytes to sum in", op.to.bytes);
    const bool complete = contents_.is(op.from, all_gradients(op.unit, 0));
    normed_[op.to.slot].push_back({op.unit, complete ? std::string() : contents_.text(op.from)});
  }

  void agree(const Op& op) {
    agreed_ = true;
    std::map<std::size_t, std::size_t> normed;  // by unit
    for (const Piece* sums : {&op.to, &op.state}) {
      for (const auto& [unit, instead] : normed_[sums->slot]) {
        ++normed[unit];
        if (!instead.empty()) complain("needs a norm of {}, has one of {}", to_text(all_gradients(unit, 0)), instead);
      }
    }
    for (std::size_t unit = 0; unit < updates_.size(); ++unit) {
      const bool has_gradients = uses_.backward_visits(unit) > 0 && layout(unit).trained.count() > 0;
      if (normed[unit] != (has_gradients ? 1 : 0)) complain("unit {} is in the norm {} times", unit, normed[unit]);
    }
  }

  void update(const Op& op) {
    const Range range = of_tile(op.unit, op.tile);
    const std::size_t version = updates_[op.unit][op.tile]++;
    if (!agreed_ && !in_.schedule.update_in_backward) complain("comes before the agreement");
    if (op.from.bytes != range.count * sizeof(float) || op.to.bytes != range.count * width(op.unit)) {
      complain("updates {} bytes with {}", op.to.bytes, op.from.bytes);
    }
    expect(op.from, all_gradients(op.unit, layout(op.unit).tiles[op.tile].first));
    expect(op.to, parameters(op.unit, range.first, version));
    expect(op.state, state(op.unit, op.tile, version));
    contents_.write(op.to, parameters(op.unit, range.first, version + 1));
    contents_.write(op.state, state(op.unit, op.tile, version + 1));
  }

  void write(const Op& op) {
    const Range range = of_tile(op.unit, op.tile);
    const std::size_t version = updates_[op.unit][op.tile];
    const BlockSizes sizes = in_.blocks.in_record(op.unit);
    const Piece block = op.from.part(in_.blocks.records().payload, sizes.bytes());
    if (sizes.parameter > 0) {
      expect(block.part(0, range.count * width(op.unit)), parameters(op.unit, range.first, version));
    }
    expect(block.part(sizes.parameter, sizes.state), state(op.unit, op.tile, version));
    if (!written_.insert({op.unit, op.tile}).second) complain("writes a tile twice");
    on_drive_[{op.unit, op.tile}] = version;
  }

  void commit() {
    for (const Home& home : program_.homes) {
      if (home.on_drive && !written_.contains({home.unit, home.tile})) {
        complain("unit {} tile {} was not written", home.unit, home.tile);
      }
    }
  }

  // Updates that a unit's parameters have by now, as the trainer should find them.
  std::size_t round_version(std::size_t unit) const { return uses_.backward_visits(unit) > 0 ? rounds_done_ : 0; }

  void end_of_round(std::size_t rounds) {
    rounds_done_ = rounds;
    if (used_ != trace_.size() * in_.micro_steps) complain("the trainer is asked for {} uses", used_);
    if (!agreed_) complain("nothing was agreed on");
    if (!committed_ && !written_.empty()) complain("what was written is not committed");
    for (std::size_t unit = 0; unit < updates_.size(); ++unit) {
      for (const std::size_t updates : updates_[unit]) {
        if (updates != round_version(unit)) complain("a tile of unit {} was updated {} times", unit, updates);
      }
    }
    for (const Home& home : program_.homes) {
      if (home.parameters.exists()) {
        const Range trained = intersection(home.range, {0, layout(home.unit).trained.count()});
        expect(home.parameters.part(0, trained.count * width(home.unit)),
               parameters(home.unit, home.range.first, round_version(home.unit)));
      }
    }
  }

  using TileName = std::pair<std::size_t, std::size_t>;
  struct Normed {
    std::size_t unit;
    std::string instead;  // of all gradients, if that is something else
  };

  const CompileInput& in_;
  const Program& program_;
  const Trace trace_;
  Uses uses_;
  Contents contents_;
  std::vector<std::vector<std::size_t>> updates_;      // by unit and tile
  std::map<TileName, std::size_t> on_drive_;           // versions
  std::set<TileName> written_;                         // in this round
  std::map<std::size_t, std::vector<Normed>> normed_;  // by slot, in this round
  std::size_t used_ = 0;
  std::size_t rounds_done_ = 0;
  bool agreed_ = false;
  bool committed_ = false;
  std::string where_;
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> verify(const CompileInput& input, const Program& program) {
  const Unrolled unrolled(program);
  std::vector<std::string> problems = unrolled.races();
  for (const auto& more : {unrolled.early_writes(), Follower(input, program).run()}) {
    problems.insert(problems.end(), more.begin(), more.end());
  }
  return problems;
}

}  // namespace ballast
