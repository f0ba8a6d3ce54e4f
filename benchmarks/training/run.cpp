#include "benchmarks/training/run.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>

#include "examples/llama/llama.h"
#include "examples/llama/noise.h"
#include "examples/llama/rows.h"
#include "examples/llama/tokens.h"

namespace ballast::benchmarks {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::vector<optim::Rule> rules_of(const RunOptions& options) {
  const optim::AdamW adamw{.lr = options.lr, .beta2 = 0.95, .weight_decay = options.weight_decay};
  optim::AdamW without_decay = adamw;
  without_decay.weight_decay = 0.0;
  return {adamw, without_decay};
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

// The products of the layers except the last one of each, whose result is not needed.
double recomputed_operations_of_token(const llama::Config& config, const llama::Batch& batch) {
  llama::Config without_head = config;
  without_head.vocabulary = 0;
  const auto last = static_cast<double>(config.layers * config.hidden * config.intermediate);
  return llama::operations_of_token(without_head, batch.context) / 3 - 2 * last;
}

class Run {
 public:
  Run(const RunOptions& options, Communicator& world, llama::Maths& maths, Observer& observer)
      : options_(options), world_(world), maths_(maths), observer_(observer), text_(options.text) {
    if (options.training.schedule.layer_major) options_.batch.together = options.training.micro_steps;
    options_.training.gpu = maths.gpu();
    options_.training.stream = maths.stream();
    options_.training.trace = llama::trace_of(options.model);
    begin();
    training_.emplace(architecture_.model, world, rules_of(options_), options_.training);
    model_.emplace(options.model, options_.batch, maths);
    training_->start(llama::initial_values(architecture_.model, options.seed));
  }

  void all_steps() {
    last_step_ended_ = now();
    for (std::uint64_t step = training_->steps(); step < options_.steps; ++step) {
      observer_.step(one_step(step));
    }
    training_->finish();
  }

  void end() {
    End end;
    if (options_.training.keeps_timeline) end.trace = training_->chrome_trace();
    if (options_.hashes_parameters || options_.keeps_parameters) read_parameters(end);
    observer_.end(end);
  }

 private:
  void read_parameters(End& end) {
    for (std::size_t unit = 0; unit < training_->model().units.size(); ++unit) {
      const Lease lease = training_->forward(unit);
      for (std::size_t tensor = 0; tensor < training_->model().units[unit].tensors.size(); ++tensor) {
        add_to_end(lease[tensor], end);
      }
    }
  }

  void begin() {
    const Plan plan(architecture_.model, {world_.rank(), world_.size(), world_.ranks_per_host()}, rules_of(options_),
                    options_.training);
    Start start{.ranks = world_.size(),
                .parameters = llama::parameters_of(plan.model()),
                .library = maths_.library(),
                .on_gpu = maths_.gpu().has_value(),
                .ledger = plan.ledger(),
                .needs = needs_of(options_, plan),
                .drive_work = drive_work_of(plan.compiled())};
    require_enough(start.needs, options_, plan);
    world_.barrier();  // all ranks measure at the same time, as they compute later
    if (options_.measures_rate) matrix_rate_ = measure_matrix_rate(maths_, options_.model.dtype);
    if (options_.forecasts) start.forecast = forecast(options_, plan, world_, maths_);
    start.matrix_rate = mean_of_ranks(matrix_rate_) * static_cast<double>(world_.size());
    start.most_resident = resident_memory().peak;
    forget_peak();
    world_.barrier();  // the ranks of a process have one peak
    observer_.begin(start);
  }

  std::vector<std::uint32_t> draw(std::uint64_t key) const {
    const std::size_t length = options_.batch.context + 1;
    if (text_.size() > 0) return text_.draw(key, options_.batch.sequences, length);
    return make_up(key, options_.batch.sequences * length, options_.model.vocabulary);
  }

  Step one_step(std::uint64_t number) {
    const double begin = now();
    double loss = 0;
    std::vector<std::uint32_t> drawn;
    for (std::uint64_t micro = 0; micro < options_.training.micro_steps; ++micro) {
      const auto more = draw(llama::noise({options_.seed, number, micro, world_.rank()}));
      drawn.insert(drawn.end(), more.begin(), more.end());
      if ((micro + 1) % options_.batch.together > 0) continue;
      loss += model_->run(*training_, drawn);
      drawn.clear();
    }
    const double computed = now() - begin;
    const StepResult result = training_->step();
    if (options_.waits_for_updates) training_->finish();
    const double end = now();
    Step step{.step = number + 1,
              .loss = mean_of_ranks(loss / static_cast<double>(options_.training.micro_steps)),
              .norm = result.norm,
              .seconds = end - std::exchange(last_step_ended_, end),
              .bytes = result.metrics.memory,
              .metrics = result.metrics,
              .resident = resident_memory(),
              .skipped = result.reason};
    step.bytes[static_cast<std::size_t>(Tier::device)] += llama::activation_bytes(options_.model, options_.batch);
    require_kept(step.resident, options_.memory);
    rate(step, computed);
    return step;
  }

  // `computed`: seconds from the first forward to the last backward, including waiting.
  void rate(Step& step, double computed) const {
    const auto tokens = static_cast<double>(options_.batch.positions() * options_.training.micro_steps);
    step.tokens_per_second = tokens * static_cast<double>(world_.size()) / step.seconds;
    if (matrix_rate_ == 0) return;
    const double model_operations = tokens * llama::operations_of_token(options_.model, options_.batch.context);
    const double again = tokens * recomputed_operations_of_token(options_.model, options_.batch);
    const double alone = computed - step.metrics.exposed[static_cast<std::size_t>(Phase::forward)] -
                         step.metrics.exposed[static_cast<std::size_t>(Phase::backward)];
    step.mfu = model_operations / step.seconds / matrix_rate_;
    step.matrix_use = (model_operations + again) / alone / matrix_rate_;
  }

  // The ranks exchange doubles, so that no bit is lost.
  double mean_of_ranks(double mine) const {
    std::vector<double> all(world_.size());
    const auto bytes = std::as_writable_bytes(std::span(all));
    const View to(bytes.data(), bytes.size(), DType::u8);
    const ConstView from(reinterpret_cast<const std::byte*>(&mine), sizeof(mine), DType::u8);
    world_.all_gather(from, to);
    double sum = 0;
    for (const double each : all) {
      sum += each;
    }
    return sum / static_cast<double>(all.size());
  }

  void add_to_end(const ConstView& tensor, End& end) const {
    std::vector<std::byte> bytes(tensor.bytes());
    maths_.download(tensor.data(), bytes.data(), bytes.size());
    std::vector<float> values(tensor.count());
    llama::rows::read(ConstView(bytes.data(), tensor.count(), tensor.dtype()), 0, values);
    for (const float value : values) {
      end.parameters_hash = llama::noise({end.parameters_hash, std::bit_cast<std::uint32_t>(value)});
    }
    if (options_.keeps_parameters) end.parameters.insert(end.parameters.end(), values.begin(), values.end());
  }

  RunOptions options_;
  Communicator& world_;
  llama::Maths& maths_;
  Observer& observer_;
  llama::TokenFiles text_;
  llama::Architecture architecture_{options_.model};
  std::optional<Training> training_{};
  std::optional<llama::Llama> model_{};
  double matrix_rate_ = 0;  // this rank's rate
  double last_step_ended_ = 0;
};

}  // namespace

void train(const RunOptions& options, Communicator& world, llama::Maths& maths, Observer& observer) {
  Run run(options, world, maths, observer);
  run.all_steps();
  run.end();
}

}  // namespace ballast::benchmarks
