#include "benchmarks/training/run.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>

#include "examples/llama/multiply.h"
#include "examples/llama/noise.h"
#include "offload/preflight.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"

namespace ballast::benchmarks {
namespace {

// Stacks of threads, and memory that oneDNN, TBB and malloc keep: 8 to 20 MiB were measured.
constexpr std::size_t resident_of_libraries = std::size_t{10} << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Sets what a model of this width and these heads leaves out: the widths of heads and MLPs, and the heads of keys and values.
llama::Config completed(llama::Config model) {
  require(model.layers > 0 && model.heads > 0 && model.hidden > 0 && model.hidden % (2 * model.heads) == 0,
          Code::bad_argument, [&] {
            return Problem{.what = fmt::format("cannot divide a width of {} among {} heads", model.hidden, model.heads),
                           .needed = "layers, and heads of an even width"};
          });
  constexpr std::size_t step = 32;
  model.head_width = model.hidden / model.heads;
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  if (model.intermediate == 0) model.intermediate = (model.hidden * 8 / 3 + step - 1) / step * step;
  return model;
}

RunOptions completed(RunOptions options, const llama::Maths& maths) {
  options.model = completed(options.model);
  llama::complete(options, maths);
  options.training.keeps_timeline = true;  // for the share of the forward pass
  return options;
}

// Returns made-up sequences, of which half can be learned: most tokens follow from the one before.
std::vector<std::uint32_t> make_up(std::uint64_t key, std::size_t count, std::size_t vocabulary) {
  std::vector<std::uint32_t> tokens(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t bits = llama::noise({key, i});
    tokens[i] = static_cast<std::uint32_t>((bits % 4 == 0 || i == 0 ? bits >> 2 : 5 * tokens[i - 1] + 1) % vocabulary);
  }
  return tokens;
}

double forward_share(std::span<const UnitWork> work) {
  double forward = 0, both = 0;
  for (const UnitWork& unit : work) {
    forward += unit.forward_seconds;
    both += unit.forward_seconds + unit.backward_seconds;
  }
  return forward / both;
}

class Run {
 public:
  Run(const RunOptions& options, Communicator& world, llama::Maths& maths)
      : options_(completed(options, maths)), world_(world), maths_(maths) {
    begin();
    training_.emplace(architecture_.model, world, llama::rules_of(options_), options_.training);
    model_.emplace(options_.model, options_.batch, maths);
    training_->start(llama::initial_values(architecture_.model, options_.seed));
  }

  void all_steps(const std::function<void(const Start&, const Step&)>& report) {
    last_step_ended_ = now();
    while (training_->steps() < options_.steps) {
      report(start_, one_step());
    }
    training_->finish();
  }

  std::uint64_t hash_of_parameters() {
    std::vector<float> values;
    for (std::size_t unit = 0; unit < training_->model().units.size(); ++unit) {
      const Lease lease = training_->forward(unit);
      for (std::size_t tensor = 0; tensor < training_->model().units[unit].tensors.size(); ++tensor) {
        append(lease[tensor], values);
      }
    }
    std::uint64_t hash = 0;
    for (const float value : values) {
      hash = llama::noise({hash, std::bit_cast<std::uint32_t>(value)});
    }
    return hash;
  }

 private:
  void begin() {
    const Plan plan(architecture_.model, {world_.rank(), world_.size(), world_.ranks_per_host()},
                    llama::rules_of(options_), options_.training);
    start_ = {.announced_bytes = announced_memory(options_, plan), .drive_work = drive_work_of(compiled(plan))};
    world_.barrier();  // all ranks measure at the same time, as they compute later
    if (options_.forecasts) start_.forecast_seconds = forecast(options_, plan, world_, maths_);
    forget_peak();
    world_.barrier();  // the ranks of a process have one peak
  }

  Step one_step() {
    const std::size_t sequence = options_.batch.context + 1;
    const double loss = llama::run_micro_steps(*model_, *training_, options_, world_.rank(), [&](std::uint64_t key) {
      return make_up(key, options_.batch.sequences * sequence, options_.model.vocabulary);
    });
    Step step{.step = training_->steps() + 1, .result = training_->step()};
    if (options_.waits_for_updates) training_->finish();
    const double end = now();
    step.seconds = end - std::exchange(last_step_ended_, end);
    step.loss = world_.mean(loss);
    step.tokens_per_second =
        static_cast<double>(options_.batch.positions() * options_.training.micro_steps * world_.size()) / step.seconds;
    step.forward_share = forward_share(training_->unit_work());
    step.bytes = step.result.metrics.memory;
    step.bytes[static_cast<std::size_t>(Tier::device)] += llama::activation_bytes(options_.model, options_.batch);
    step.resident = resident_memory();
    return step;
  }

  void append(const ConstView& tensor, std::vector<float>& to) const {
    std::vector<std::byte> bytes(tensor.bytes());
    const View copy(bytes.data(), tensor.count(), tensor.dtype());
    maths_.copy(tensor, copy);
    maths_.wait();
    std::vector<float> values(tensor.count());
    llama::rows::read(copy, 0, values);
    to.insert(to.end(), values.begin(), values.end());
  }

  RunOptions options_;
  Communicator& world_;
  llama::Maths& maths_;
  llama::Architecture architecture_{options_.model};
  std::optional<Training> training_{};
  std::optional<llama::Llama> model_{};
  Start start_{};
  double last_step_ended_ = 0;
};

}  // namespace

void describe(CLI::App& app, RunOptions& o) {
  llama::describe(app, o);
  app.add_option("--layers", o.model.layers, "Layers");
  app.add_option("--width", o.model.hidden, "Width of the residual stream");
  app.add_option("--heads", o.model.heads, "Attention heads");
  app.add_option("--vocabulary", o.model.vocabulary, "Tokens that there are");
  app.add_option_function<std::string>(
         "--dtype", [&o](const std::string& word) { o.model.dtype = word == "fp32" ? DType::fp32 : DType::bf16; },
         "Format of parameters and activations")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_flag("!--untied", o.model.tied, "Give the head its own weight instead of the embedding's");
  app.add_flag("--wait-for-updates", o.waits_for_updates, "Wait for the updates of a step before the next one begins");
  app.add_flag("--forecast", o.forecasts, "Measure this machine first, and forecast the time of a step (CPUs)");
  app.add_flag("--hash", o.hashes_parameters, "Write a hash of the final parameters, after the steps");
}

DriveWork drive_work_of(const CompiledPlan& plan) {
  DriveWork work;
  for (const Op& op : plan.program().ops) {
    const std::size_t bytes = bytes_moved(op, plan.placement());
    if (op.kind == OpKind::read || op.kind == OpKind::read_first) work.read_bytes += bytes;
    if (op.kind == OpKind::write) work.written_bytes += bytes;
  }
  if (work.read_bytes + work.written_bytes == 0) return work;
  if (plan.input().mirror) work.written_bytes *= 2;  // those of another rank
  work.record_bytes = plan.blocks().records().record;
  const auto staging = std::ranges::find(plan.program().slots, SlotRole::staging, &Slot::role);
  if (staging != plan.program().slots.end()) work.records = staging->bytes / work.record_bytes;
  return work;
}

std::size_t announced_memory(const RunOptions& options, const Plan& plan) {
  const TierBytes tiers = bytes_by_tier(plan.ledger());
  const bool on_gpu = options.training.gpu.has_value();
  const auto in = [&](Tier tier) { return options.ranks * tiers[static_cast<std::size_t>(tier)]; };
  const std::size_t reserved = in(Tier::host) + (on_gpu ? 0 : in(Tier::device));
  const std::size_t activations = on_gpu ? 0 : options.ranks * llama::activation_bytes(options.model, options.batch);
  const RecordOptions& drives = options.training.drives;
  const CompiledPlan& compiled = ballast::compiled(plan);
  if (in(Tier::nvme) > 0 && drives.run.empty())  // the files of a run may exist already
    offload::require_space(compiled.blocks().shape(compiled.tiles_on_drive()), drives.directories, options.ranks);
  return reserved + activations + resident_of_libraries;
}

std::uint64_t train(const RunOptions& options, Communicator& world, llama::Maths& maths,
                    const std::function<void(const Start&, const Step&)>& report) {
  Run run(options, world, maths);
  run.all_steps(report);
  return options.hashes_parameters ? run.hash_of_parameters() : 0;
}

}  // namespace ballast::benchmarks
