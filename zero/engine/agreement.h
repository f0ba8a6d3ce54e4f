// The decision of a step: the norm over all ranks, whether to update, and with which factors.
#pragma once

#include <ballast/error.h>
#include <ballast/lease.h>
#include <ballast/step.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "kernels/exact_sum_math.h"
#include "kernels/runtime/buffer.h"
#include "optim/step.h"
#include "zero/comm/call.h"
#include "zero/engine/arithmetic.h"
#include "zero/engine/mesh.h"
#include "zero/engine/step_run.h"
#include "zero/plan/names_in_files.h"
#include "zero/plan/program.h"

namespace ballast {

// An operation that takes the norm of gradients that stay where they are.
struct LastingNorm {
  Op norm;
  std::size_t download = none;  // operation that took them there, if the program takes their norm on their way
};

// The norm of a unit whose parts went there, or were added there, one after another is one.
inline std::vector<LastingNorm> lasting_norms(const std::vector<Op>& list) {
  const auto agree = std::ranges::find(list, OpKind::agree, &Op::kind);
  std::vector<LastingNorm> norms;
  for (auto op = list.begin(); op != list.end(); ++op) {
    if (!takes_norm(*op)) continue;
    LastingNorm lasting{*op};
    Op& norm = lasting.norm;
    if (op->kind != OpKind::norm) {
      norm.kind = OpKind::norm;
      norm.from = op->to;
      norm.to = std::exchange(norm.state, {});
    }
    const auto download = std::find_if(op, list.end(), [&](const Op& d) {
      return d.kind == OpKind::download && d.unit == op->unit && d.tile == none;
    });
    if (download != list.end() && download->from == norm.from) {
      norm.lane = Lane::host;
      norm.from = download->to;
      norm.to = agree->state;
      lasting.download = static_cast<std::size_t>(download - list.begin());
    }
    if (norm.first > 0) {
      norms.back().norm.from.bytes += norm.from.bytes;
      norms.back().download = lasting.download;
    } else {
      norms.push_back(lasting);
    }
  }
  return norms;
}

// Each tensor's gradients in this rank's shards when they are complete: sums of their squares, for norms of single tensors,
// and their memory. Called by the trainer's thread between steps, when nothing is under way.
class TensorSums {
 public:
  // All arguments outlive this.
  TensorSums(const CompiledPlan& plan, const LaneArithmetic& arithmetic, MemoryAccounts& accounts,
             std::optional<int> gpu)
      : plan_(plan), arithmetic_(arithmetic), accounts_(accounts), gpu_(gpu) {}

  // Returns the sum of each tensor, unit by unit, from the gradients of the norm operations in `list`. Issues all sums,
  // and waits for the GPU once.
  std::vector<kernels::ExactSum> of(const std::vector<Op>& list) {
    const std::vector<LastingNorm> norms = lasting_norms(list);
    const std::vector<Part> parts = parts_of(norms);
    std::vector<const Op*> users;  // one operation for each sum in whose memory others are computed
    for (const Part& part : parts) {
      if (std::ranges::none_of(users, [&](const Op* user) { return user->to.slot == part.norm->to.slot; })) {
        users.push_back(part.norm);
      }
    }
    const std::span<kernels::ExactSum> memory = host_memory(users.size() + parts.size());
    const auto saved = memory.first(users.size()), sums = memory.subspan(users.size());
    const auto of = [&](const Op& op) -> const Arithmetic& { return arithmetic_.of(op.lane); };
    for (std::size_t i = 0; i < users.size(); ++i)
      of(*users[i]).save_sum(users[i]->to, &saved[i]);
    for (std::size_t i = 0; i < parts.size(); ++i)
      of(*parts[i].norm).squares_of(*parts[i].norm, parts[i].range, &sums[i]);
    for (std::size_t i = 0; i < users.size(); ++i)
      of(*users[i]).restore_sum(users[i]->to, &saved[i]);
    for (const Op* user : users)
      of(*user).context().finish();

    std::vector<kernels::ExactSum> tensor_sums(begins().back());
    for (std::size_t i = 0; i < parts.size(); ++i)
      kernels::merge(tensor_sums[parts[i].tensor], sums[i]);
    return tensor_sums;
  }

  // Shows the gradients of the norm operations in `list`, which may be changed meanwhile, and then adds their squares up
  // again for `agree`.
  void visit(const std::vector<Op>& list, const Op& agree, const Slots& slots, const GradientVisitor& visit) {
    const std::vector<LastingNorm> norms = lasting_norms(list);
    const std::vector<std::size_t> begins = this->begins();
    for (const Part& part : parts_of(norms)) {
      const Op& norm = *part.norm;
      const View gradients = slots.view(norm.from, plan_.input().dtype_of_sums(norm.unit));
      visit(norm.unit, part.tensor - begins[norm.unit], gradients.part(part.range.first, part.range.count),
            slots.on_gpu(norm.from));
    }
    const auto of = [&](Lane lane) -> const Arithmetic& { return arithmetic_.of(lane); };
    if (agree.to.exists()) of(agree.lane).take_sum(agree.to);
    if (agree.state.exists()) of(Lane::host).take_sum(agree.state);
    for (const LastingNorm& each : norms)
      of(each.norm.lane).add_squares(each.norm);
    for (const LastingNorm& each : norms)
      of(each.norm.lane).context().finish();
  }

 private:
  struct Part {
    const Op* norm;
    std::size_t tensor;  // number among the tensors of all units
    Range range;         // elements of the shard
  };

  // The first number of each unit's tensors among those of all units, and their end.
  std::vector<std::size_t> begins() const {
    std::vector<std::size_t> begins{0};
    for (const Unit& unit : plan_.model().units)
      begins.push_back(begins.back() + unit.tensors.size());
    return begins;
  }

  std::vector<Part> parts_of(const std::vector<LastingNorm>& norms) const {
    const std::vector<Unit>& units = plan_.model().units;
    const std::vector<std::size_t> begins = this->begins();
    std::vector<Part> parts;
    for (const auto& [op, download] : norms) {
      const UnitLayout& layout = plan_.layout().units[op.unit];
      for (const TensorPart& part : tensors_in(units[op.unit], layout, layout.trained,
                                               plan_.input().rank_in_shard_group, {0, layout.trained.shard})) {
        parts.push_back({&op, begins[op.unit] + part.tensor, {part.in_shard, part.range.count}});
      }
    }
    return parts;
  }

  std::span<kernels::ExactSum> host_memory(std::size_t sums) {
    const std::size_t bytes = sums * sizeof(kernels::ExactSum);
    if (host_.bytes() < bytes) {
      host_ = allocate(accounts_, {.kind = gpu_ ? MemoryKind::pinned : MemoryKind::pageable,
                                   .bytes = bytes,
                                   .owner = "norms of tensors",
                                   .gpu = gpu_.value_or(0)});
    }
    return {reinterpret_cast<kernels::ExactSum*>(host_.data()), sums};
  }

  const CompiledPlan& plan_;
  const LaneArithmetic& arithmetic_;
  MemoryAccounts& accounts_;
  std::optional<int> gpu_;
  Buffer host_;  // pinned if there is a GPU; reserved by the first call, because few trainings ask for these norms
};

using OptionDigests = std::vector<std::pair<std::string_view, std::int64_t>>;  // by the options' names

// Returns the rank for which the others wait. Throws B1001 if a step's option is not that of rank 0. One exchange serves both. All
// ranks call it together, with options of the same names, and get or throw the same.
inline Straggler find_straggler(Mesh& mesh, double own_seconds, const OptionDigests& options = {}) {
  std::vector<std::int64_t> numbers((1 + options.size()) * mesh.ranks());  // the sums put those of all ranks together
  const auto number_of = [&](std::size_t number, std::size_t rank) -> std::int64_t& {
    return numbers[number * mesh.ranks() + rank];
  };
  number_of(0, mesh.rank()) = static_cast<std::int64_t>(own_seconds * 1e9);
  for (std::size_t i = 0; i < options.size(); ++i)
    number_of(1 + i, mesh.rank()) = options[i].second;
  mesh.reduce->all_reduce(numbers);
  mesh.replicas->all_reduce(numbers);
  for (std::size_t i = 0; i < options.size(); ++i) {
    for (std::size_t rank = 0; rank < mesh.ranks(); ++rank) {
      require(number_of(1 + i, rank) == number_of(1 + i, 0), Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot step: rank {} has another {} than rank 0", rank, options[i].first),
                       .needed = "the same options of the step on all ranks"};
      });
    }
  }
  std::vector<std::int64_t>& nanoseconds = numbers;
  nanoseconds.resize(mesh.ranks());
  const auto slowest = std::ranges::max_element(nanoseconds);
  Straggler straggler{.slowest = static_cast<std::size_t>(slowest - nanoseconds.begin()),
                      .seconds = static_cast<double>(*slowest) * 1e-9};
  std::ranges::sort(nanoseconds);
  straggler.median = static_cast<double>(nanoseconds[nanoseconds.size() / 2]) * 1e-9;
  straggler.least = static_cast<double>(nanoseconds.front()) * 1e-9;
  return straggler;
}

// prepare() and everything between steps is called by the trainer's thread; agree() by the lane of the operation
// `agree`, which was issued after prepare() and is done before the next step begins.
class Agreement {
 public:
  Agreement(const CompiledPlan& plan, Mesh& mesh, const LaneArithmetic& arithmetic, TensorSums& tensor_sums,
            bool sums_micro_steps)
      : plan_(plan),
        mesh_(mesh),
        arithmetic_(arithmetic),
        tensor_sums_(tensor_sums),
        sums_micro_steps_(sums_micro_steps),
        uses_of_pass_(uses_in_backward(plan.model(), trace_of(plan.input()))) {}
  Agreement(Agreement&&) = delete;

  // check() throws if a step cannot use these options. prepare() copies them for the next step.
  void check(const StepOptions& options) const {
    require_rules(plan_, options);
    require_missed(plan_.model(), options.missed, steps_);
    const bool in_backward = plan_.input().schedule.update_in_backward;
    require_clipping(in_backward, options.max_norm.value_or(optim::no_clipping));
    require(!in_backward || options.micro_steps.value_or(1) == 1, Code::bad_argument, [] {
      return Problem{.what = "cannot accumulate micro-steps: parameters are updated in the backward pass",
                     .needed = "one micro-step, or updates after the backward pass"};
    });
  }

  void prepare(const StepOptions& options) {
    rules_.assign(options.groups.begin(), options.groups.end());
    missed_.assign(options.missed.begin(), options.missed.end());
    options_ = options;
    options_.groups = rules_;
    options_.missed = missed_;
    is_prepared_ = true;
  }

  // Expects these rules and missed steps of the next step: see Training::expect(). Of what is left out, those of the last step.
  void expect(std::optional<std::span<const optim::Rule>> rules,
              std::optional<std::span<const std::uint64_t>> missed = {}) {
    if (rules) {
      require_rules(plan_, {.groups = *rules});
      rules_.assign(rules->begin(), rules->end());
    }
    if (missed) {
      require_missed(plan_.model(), *missed, steps_);
      missed_.assign(missed->begin(), missed->end());
    }
    options_.loss_scale = usual_.loss_scale;
    options_.micro_steps = usual_.micro_steps;
  }

  ExpectedStep expected() const { return expected_of(decide({})); }

  // Throw if a step's uses are not those of so many micro-steps: of the prepared one, or before it.
  void check_accumulated(const Trace& visited) const {
    if (options_.discard || plan_.input().schedule.update_in_backward) return;
    check_accumulated(visited, options_.micro_steps);
  }

  // Trainers may use units in any order, and leave some of them out, so that most counts are possible for a unit. A wrong
  // number of micro-steps is the wrong one for all units.
  void check_accumulated(const Trace& visited, std::optional<std::size_t> micro_steps) const {
    if (sums_micro_steps_ && !micro_steps) return;
    const std::size_t number = micro_steps.value_or(planned_micro_steps());
    const std::vector<Unit>& units = plan_.model().units;
    const std::vector<std::size_t> uses = uses_in_backward(plan_.model(), visited);
    std::size_t other = none;  // the first unit with uses that are not as many
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      if (uses[unit] == 0) continue;
      if (uses[unit] == number * uses_of_micro_step(unit)) return;
      other = std::min(other, unit);
    }
    require(number > 0, Code::out_of_order,
            [] { return Problem{.what = "cannot step with 0 micro-steps", .needed = "at least 1"}; });
    require(other == none, Code::out_of_order, [&] {
      return Problem{
          .what = fmt::format("cannot step with {}: another number was accumulated", counted(number, "micro-step")),
          .where = fmt::format("unit {}, and all other units with gradients", units[other].name),
          .needed = counted(number * uses_of_micro_step(other), "use") + " in backward",
          .available = counted(uses[other], "use"),
          .remedy =
              "Name the micro-steps that were made in StepOptions::micro_steps. Where a micro-step uses units "
              "several times, give TrainingOptions::trace; where gradients are added and not averaged, set "
              "TrainingOptions::sums_micro_steps."};
    });
  }

  // The next step leaves it out.
  void leave_out(std::size_t unit, std::size_t tensor) { left_out_.emplace_back(unit, tensor); }
  bool is_prepared() const { return is_prepared_; }
  void cancel() { is_prepared_ = false; }  // the step that was prepared is not made
  bool has_custom_update() const { return static_cast<bool>(options_.update); }
  TrainerUpdate take_custom_update() { return std::exchange(options_.update, {}); }

  void end_step(std::uint64_t steps) {  // nothing is prepared any more
    steps_ = steps;
    is_prepared_ = false;
    left_out_.clear();
    const Scale scale{options_.loss_scale, options_.micro_steps};
    if (std::exchange(last_, scale) == scale) usual_ = scale;
  }

  std::uint64_t steps() const { return steps_; }  // updates made so far
  void set_steps(std::uint64_t steps) { steps_ = steps; }

  // Return norms of the summed gradients, before the operation `agree`. All ranks call together. The norms of all
  // tensors, by unit, come from the norm operations in `list`; they need one exchange, as the norm of all does.
  double norm(const Op& agree, double loss_scale, std::optional<std::size_t> micro_steps) {
    kernels::ExactSum squares;
    if (agree.to.exists()) kernels::merge(squares, arithmetic_.of(agree.lane).read_sum(agree.to));
    if (agree.state.exists()) kernels::merge(squares, arithmetic_.of(Lane::host).read_sum(agree.state));
    options_.loss_scale = loss_scale;
    options_.micro_steps = micro_steps;
    return decide(sum_over_model(squares)).norm;
  }

  std::vector<std::vector<double>> tensor_norms(const std::vector<Op>& list, double loss_scale,
                                                std::optional<std::size_t> micro_steps) {
    options_.loss_scale = loss_scale;
    options_.micro_steps = micro_steps;
    std::vector<kernels::ExactSum> squares = tensor_sums_.of(list);
    sum_over_shards(squares);
    std::vector<std::vector<double>> norms;
    std::span<const kernels::ExactSum> rest = squares;
    for (const Unit& unit : plan_.model().units) {
      std::vector<double>& unit_norms = norms.emplace_back();
      for (const kernels::ExactSum& sum : rest.first(unit.tensors.size()))
        unit_norms.push_back(decide(sum).norm);
      rest = rest.subspan(unit.tensors.size());
    }
    return norms;
  }

  void agree(const Op& op, StepRun& run, double own_seconds) {  // fills in numbers and result
    kernels::ExactSum sum;  // the sum of this rank's sums, on the device and on the host
    if (op.to.exists()) kernels::merge(sum, arithmetic_.of(op.lane).take_sum(op.to));
    if (op.state.exists()) kernels::merge(sum, arithmetic_.of(Lane::host).take_sum(op.state));
    optim::Decision decision = decide(sum_over_model(sum));
    const bool is_finite = !decision.skip;
    decision.skip = decision.skip || options_.discard;
    run.is_as_expected = !decision.skip && left_out_.empty() && run.expected == expected_of(decision);
    run.result = {.norm = decision.norm,
                  .straggler = find_straggler(mesh_, own_seconds, digests_of_options(run.is_as_expected))};
    run.result.step = run.numbers.number;
    if (!plan_.input().schedule.update_in_backward) {
      StepNumbers& numbers = run.is_early ? run.decided : run.numbers;
      numbers = numbers_of(decision);
      run.result.step = numbers.number;
      run.result.skipped = decision.skip;
      if (!is_finite) {
        run.result.reason = "the gradients are not finite, first in " + first_wrong_parameter(run);
      } else if (decision.skip) {
        run.result.reason = "the caller discarded the gradients";
      }
    } else if (decision.skip) {  // updates are made already, nothing can be skipped any more
      run.result.reason = "the gradients are not finite, and the parameters are updated with them already";
    }
  }

  // Returns the numbers of updates in the backward pass.
  StepNumbers numbers_before_norm() const { return numbers_of(decide({})); }

 private:
  // What divides gradients before they are clipped.
  struct Scale {
    double loss_scale = 1.0;
    std::optional<std::size_t> micro_steps{};
    bool operator==(const Scale&) const = default;
  };

  static std::string counted(std::size_t count, std::string_view what) {
    return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
  }

  // Counts the uses of each unit.
  static std::vector<std::size_t> uses_in_backward(const Model& model, const Trace& trace) {
    std::vector<std::size_t> uses(model.units.size());
    for (const Visit& visit : trace)
      uses[visit.unit] += visit.phase == Phase::backward ? 1 : 0;
    return uses;
  }

  std::size_t planned_micro_steps() const { return plan_.input().micro_steps * plan_.input().in_one_pass; }
  std::size_t uses_of_micro_step(std::size_t unit) const {
    return std::max<std::size_t>(uses_of_pass_[unit] / plan_.input().in_one_pass, 1);
  }

  std::string text_of_rules() const {
    std::string rules;
    for (const optim::Rule& rule : rules_) {
      for (const auto& [name, value] : optim::named_options(rule))
        rules += ' ' + value;
    }
    return rules;
  }

  ExpectedStep expected_of(const optim::Decision& decision) const {
    return {text_of_rules(), missed_, decision.gradient_factor};
  }

  // Ranks that repeat the updates of a step exchange other bytes than those that do not.
  OptionDigests digests_of_options(bool is_as_expected) const {
    const auto digest = [](const auto& value) {
      return static_cast<std::int64_t>(std::hash<std::decay_t<decltype(value)>>()(value));
    };
    return {{"rule", digest(text_of_rules())},
            {"expectation of the step's options", digest(is_as_expected)},
            {"max_norm", digest(options_.max_norm.value_or(optim::no_clipping))},
            {"loss_scale", digest(options_.loss_scale)},
            {"number of micro-steps", digest(options_.micro_steps.value_or(planned_micro_steps()))},
            {"choice to discard the gradients", digest(options_.discard)}};
  }

  static void require_rules(const CompiledPlan& plan, const StepOptions& options) {
    require_groups(plan.model(), options.groups.size());
    for (std::size_t group = 0; group < options.groups.size(); ++group) {
      const optim::Rule& rule = options.groups[group];
      optim::check(rule);
      const std::string found = describe(rule);
      require(found == plan.rule(), Code::bad_argument, [&] {
        return Problem{
            .what = fmt::format("cannot prepare a step: its rule is not the one that the training was planned "
                                "with, whose state it keeps"),
            .where = fmt::format("parameter group {}", group),
            .needed = plan.rule(),
            .available = found,
            .remedy = "Change options of the rule only; train with another rule in another training."};
      });
      require(std::holds_alternative<optim::External>(rule) == static_cast<bool>(options.update), Code::bad_argument,
              [] {
                return Problem{.what = "cannot prepare a step: its rule and its custom update do not go together",
                               .needed = "StepOptions::update for External, and for no other rule"};
              });
    }
  }

  static void require_missed(const Model& model, std::span<const std::uint64_t> missed, std::uint64_t steps) {
    std::size_t tensors = 0;
    for (const Unit& unit : model.units)
      tensors += unit.tensors.size();
    require(missed.empty() || missed.size() == tensors, Code::wrong_size, [&] {
      return Problem{.what = "cannot prepare a step: its missed steps are not those of each tensor",
                     .needed = fmt::format("{} counts, or none", tensors),
                     .available = fmt::format("{}", missed.size())};
    });
    require(std::ranges::all_of(missed, [&](std::uint64_t count) { return count <= steps; }), Code::bad_argument, [&] {
      return Problem{.what = "cannot prepare a step: a tensor has missed more steps than there were",
                     .needed = fmt::format("{} at most", steps)};
    });
  }

  optim::Decision decide(const kernels::ExactSum& squares) const {
    const Placement& placement = plan_.placement();
    const std::size_t micro_steps = sums_micro_steps_ ? 1 : options_.micro_steps.value_or(planned_micro_steps());
    return optim::decide({.sum_of_squares = kernels::value(squares),
                          .loss_scale = options_.loss_scale,
                          .averaged_over = static_cast<double>(placement.ranks() * micro_steps)},
                         options_.max_norm.value_or(optim::no_clipping));
  }

  StepNumbers numbers_of(const optim::Decision& decision) const {
    StepNumbers numbers{.number = steps_ + (decision.skip ? 0u : 1u),
                        .skip = decision.skip,
                        .gradient_factor = decision.gradient_factor,
                        .groups = {}};
    for (const optim::Rule& rule : rules_)
      numbers.groups.push_back(optim::at(rule, {.number = steps_ + 1, .gradient_factor = decision.gradient_factor}));
    add_tensors(numbers);
    add_matrices(numbers);
    return numbers;
  }

  // The tensors of a parameter group that have missed as many steps share an update. A rule of whole matrices counts no steps.
  void add_tensors(StepNumbers& numbers) const {
    const bool may_leave_out = plan_.input().schedule.update_in_backward || !left_out_.empty();
    if (missed_.empty() && !may_leave_out) return;
    std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> known;  // group and missed steps
    std::size_t number = 0;
    for (const Unit& unit : plan_.model().units) {
      std::vector<std::size_t>& unit_groups = numbers.group_of.emplace_back();
      for (const Tensor& tensor : unit.tensors) {
        const std::uint64_t missed = missed_.empty() ? 0 : missed_[number++];
        if (missed == 0 || tensor.frozen || plan_.input().needs_matrices()) {
          unit_groups.push_back(tensor.group);
          continue;
        }
        const auto [found, is_new] = known.try_emplace({tensor.group, missed}, numbers.groups.size());
        unit_groups.push_back(found->second);
        if (is_new) {
          numbers.groups.push_back(optim::at(
              rules_[tensor.group], {.number = steps_ + 1 - missed, .gradient_factor = numbers.gradient_factor}));
        }
      }
    }
    for (const auto& [unit, tensor] : left_out_)
      numbers.leave_out(unit, tensor);
  }

  // Adds the second and third part of Muon's update; the first is in the groups.
  void add_matrices(StepNumbers& numbers) const {
    if (!plan_.input().needs_matrices()) return;
    for (const optim::Rule& rule : rules_)
      numbers.orthogonalizations.push_back(optim::orthogonalization_of(std::get<optim::Muon>(rule)));
    for (const MatrixGroup& matrices : plan_.matrix_groups().all())
      numbers.matrices.push_back(optim::step_of(std::get<optim::Muon>(rules_[matrices.group]), matrices.shape));
  }

  // Adds up the sums that the ranks made of their shards.
  void sum_over_shards(std::span<kernels::ExactSum> squares) const {
    const std::span words(reinterpret_cast<std::int64_t*>(squares.data()), squares.size() * kernels::exact_sum_words);
    mesh_.reduce->all_reduce(words, Purpose::agreement);
    if (plan_.placement().parameter_replicas > 1) mesh_.replicas->all_reduce(words, Purpose::agreement);
  }

  // Adds up the sums of all shards, and those of ranks that have other parts of the model.
  kernels::ExactSum sum_over_model(const kernels::ExactSum& squares) const {
    kernels::ExactSum sum = squares;
    sum_over_shards({&sum, 1});
    if (mesh_.norm != nullptr) {
      mesh_.norm->all_reduce({reinterpret_cast<std::int64_t*>(&sum), kernels::exact_sum_words}, Purpose::agreement);
    }
    return sum;
  }

  // Searches all shards. The rank that has the first such parameter tells the others.
  std::string first_wrong_parameter(const StepRun& run) const {
    const Communicator& group = *mesh_.reduce;
    std::vector<std::int64_t> found(2 * group.size());  // unit and tensor of each rank, from 1 on
    for (const auto& [op, download] : lasting_norms(*run.list)) {
      if (download != none) run.ops[download].wait();
      const std::uint64_t element = arithmetic_.of(op.lane).first_non_finite(op);
      const bool is_first =
          found[2 * group.rank()] == 0 || static_cast<std::int64_t>(op.unit + 1) < found[2 * group.rank()];
      if (element == kernels::no_index || !is_first) continue;
      const UnitLayout& layout = plan_.layout().units[op.unit];
      const auto at = tensors_in(plan_.model().units[op.unit], layout, layout.trained, group.rank(), {element, 1});
      found[2 * group.rank()] = static_cast<std::int64_t>(op.unit + 1);
      found[2 * group.rank() + 1] = at.empty() ? 0 : static_cast<std::int64_t>(at.front().tensor + 1);
    }
    mesh_.reduce->all_reduce(found);
    std::pair<std::int64_t, std::int64_t> first{std::numeric_limits<std::int64_t>::max(), 0};
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      if (found[2 * rank] > 0) first = std::min(first, {found[2 * rank], found[2 * rank + 1]});
    }
    if (first.second == 0)
      return mesh_.norm != nullptr ? "other ranks' part of the model" : "no parameter that could be named";
    const Unit& unit = plan_.model().units[static_cast<std::size_t>(first.first - 1)];
    return fmt::format("{} (unit {})", unit.tensors[static_cast<std::size_t>(first.second - 1)].name, unit.name);
  }

  const CompiledPlan& plan_;
  Mesh& mesh_;
  const LaneArithmetic& arithmetic_;
  TensorSums& tensor_sums_;
  bool sums_micro_steps_;
  std::vector<std::size_t> uses_of_pass_;  // uses in backward, for each unit
  std::vector<optim::Rule> rules_;
  std::vector<std::uint64_t> missed_;
  StepOptions options_{};                                      // its groups are rules_, its missed is missed_
  std::vector<std::pair<std::size_t, std::size_t>> left_out_;  // unit and tensor
  bool is_prepared_ = false;
  Scale last_{};   // of the last step
  Scale usual_{};  // of the last two steps that had the same: torch's clipping makes one of its own for some steps
  std::uint64_t steps_ = 0;
};

}  // namespace ballast
