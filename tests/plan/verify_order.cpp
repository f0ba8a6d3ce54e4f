#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tests/plan/verify.h"

namespace ballast {
namespace {

bool moves_record(const Op& op) {
  return op.kind == OpKind::read || op.kind == OpKind::read_first || op.kind == OpKind::write;
}

// A read finds the newest write, so their order matters.
bool share_record(const Op& a, const Op& b) {
  const bool one_writes = a.kind == OpKind::write || b.kind == OpKind::write;
  return one_writes && moves_record(a) && moves_record(b) && a.unit == b.unit && a.tile == b.tile;
}

bool conflict(const Op& a, const Op& b) {
  const auto writes_what_touches = [](const Op& writer, const Op& other) {
    for (const Piece* written : {&writer.to, &writer.state, &writer.codes.memory}) {
      for (const Piece* touched : {&other.from, &other.to, &other.state, &other.codes.memory}) {
        if (overlap(*written, *touched)) return true;
      }
    }
    return false;
  };
  return writes_what_touches(a, b) || writes_what_touches(b, a) || share_record(a, b);
}

// The entry and two steps, in one list.
class Unrolled {
 public:
  explicit Unrolled(const Program& program) {
    std::size_t last_step = 0;
    std::size_t begin = 0;
    std::size_t step = 0;
    for (const std::vector<Op>* ops : {&program.entry, &program.ops, &program.ops}) {
      for (std::size_t i = 0; i < ops->size(); ++i) {
        ops_.push_back(&(*ops)[i]);
        in_step_.push_back(i);
        step_.push_back(step);
        add_waits(begin + i, (*ops)[i], begin, step == 2 ? last_step : none);
      }
      last_step = begin;
      begin = ops_.size();
      ++step;
    }
    follow_lanes();
  }

  // Waits that are wrong, and every two operations that touch the same bytes in no order while one of them writes.
  std::vector<std::string> races() const {
    std::vector<std::string> problems = problems_;
    for (std::size_t later = 0; later < ops_.size(); ++later) {
      for (std::size_t earlier = 0; earlier < later; ++earlier) {
        if (!is_before(earlier, later) && conflict(op(earlier), op(later))) {
          problems.push_back(
              fmt::format("{} does not wait for {}, which uses the same bytes or record", text(later), text(earlier)));
        }
      }
    }
    return problems;
  }

  // Writes before which it is not certain that all ranks have committed the step before.
  std::vector<std::string> early_writes() const {
    std::size_t commit = none;
    std::vector<std::size_t> rendezvous;  // the operations after this rank's commit
    std::vector<std::string> problems;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const OpKind kind = op(i).kind;
      if (kind == OpKind::commit && step_[i] == 1) commit = i;
      if (commit == none || step_[i] != 2) continue;
      const bool is_rendezvous = kind == OpKind::agree || kind == OpKind::reduce || kind == OpKind::meet;
      if (is_rendezvous && is_before(commit, i)) rendezvous.push_back(i);
      if (kind != OpKind::write) continue;
      if (std::ranges::none_of(rendezvous, [&](std::size_t one) { return is_before(one, i); })) {
        problems.push_back(fmt::format("{} may come before another rank's commit of the last step", text(i)));
      }
    }
    return problems;
  }

 private:
  const Op& op(std::size_t index) const { return *ops_[index]; }
  bool is_before(std::size_t a, std::size_t b) const { return before_[b][a]; }

  // "read of step 1, operation 7"
  std::string text(std::size_t index) const {
    const std::string step = step_[index] == 0 ? "the entry" : fmt::format("step {}", step_[index]);
    return fmt::format("{} of {}, operation {}", name(op(index).kind), step, in_step_[index]);
  }

  void add_waits(std::size_t index, const Op& op, std::size_t step_begin, std::size_t last_step) {
    std::vector<std::size_t>& awaited = awaited_.emplace_back();
    for (const Wait& wait : op.after) {
      if (wait.is_last_steps && last_step == none) continue;  // the entry is over
      const std::size_t target = (wait.is_last_steps ? last_step : step_begin) + wait.op;
      if (target >= index || (wait.is_last_steps && target >= step_begin)) {
        problems_.push_back(fmt::format("{} waits for a later operation", text(index)));
      } else {
        awaited.push_back(target);
      }
    }
  }

  // A commit is after all operations of its lane that come before it in the list, and before all later ones; and so is its opposite.
  void follow_lanes() {
    std::array<std::size_t, lane_count> last;
    last.fill(none);
    std::vector<std::size_t> since_commit;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      std::vector<bool>& before = before_.emplace_back(ops_.size());
      const auto add = [&](std::size_t earlier) {
        before[earlier] = true;
        for (std::size_t j = 0; j < earlier; ++j) {
          if (before_[earlier][j]) before[j] = true;
        }
      };
      for (const std::size_t earlier : awaited_[i])
        add(earlier);
      if (step_[i] > 0) {
        for (std::size_t j = 0; j < i && step_[j] == 0; ++j)
          before[j] = true;
      }
      std::size_t& previous = last[static_cast<std::size_t>(op(i).lane)];
      if (previous != none) add(previous);
      const bool is_barrier = op(i).kind == OpKind::commit || op(i).kind == OpKind::abandon;
      if (is_barrier) {
        for (const std::size_t earlier : since_commit)
          add(earlier);
        since_commit.clear();
      }
      if (done_in_order(op(i).lane) || is_barrier) {
        previous = i;
      } else if (op(i).lane == Lane::disk) {
        since_commit.push_back(i);
      }
    }
  }

  std::vector<const Op*> ops_;
  std::vector<std::size_t> in_step_;               // index of each in its step
  std::vector<std::size_t> step_;                  // 0: the entry
  std::vector<std::vector<std::size_t>> awaited_;  // directly
  std::vector<std::vector<bool>> before_;          // directly or through others
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> wrong_order(const Program& program) {
  const Unrolled unrolled(program);
  std::vector<std::string> problems = unrolled.races();
  const std::vector<std::string> early = unrolled.early_writes();
  problems.insert(problems.end(), early.begin(), early.end());
  return problems;
}

}  // namespace ballast
