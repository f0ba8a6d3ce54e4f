#include "examples/gpt/run.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "examples/gpt/gpt.h"
#include "examples/gpt/noise.h"
#include "examples/gpt/number.h"

namespace ballast::gpt {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::vector<optim::Rule> rules_of(const RunOptions& options) {
  const optim::AdamW adamw{.lr = options.lr, .beta2 = 0.95, .weight_decay = options.weight_decay};
  optim::AdamW without_decay = adamw;
  without_decay.weight_decay = 0.0;
  return {adamw, without_decay};
}

// Returns words in a somewhat predictable order, so that the loss falls.
std::vector<std::uint8_t> made_up() {
  constexpr std::string_view words[] = {"a ship", "the sea", "takes on", "drops", "ballast", "in a storm", "at night"};
  std::vector<std::uint8_t> bytes;
  for (std::uint64_t i = 0; bytes.size() < 64 * 1024; ++i) {
    const std::string_view word = words[noise({i, 1}) % 4 == 0 ? noise({i, 2}) % std::size(words) : i % 5];
    bytes.insert(bytes.end(), word.begin(), word.end());
    bytes.push_back(i % 9 == 8 ? '\n' : ' ');
  }
  return bytes;
}

// Returns the text to learn from: files as bytes, one after the other, or made-up sentences.
std::vector<std::uint8_t> text_of(const std::vector<std::filesystem::path>& files) {
  if (files.empty()) return made_up();
  std::vector<std::uint8_t> bytes;
  for (const std::filesystem::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    require(file.good(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot read {}: {}", path.string(), std::strerror(errno)),
                     .needed = "a file that this user can read"};
    });
    bytes.insert(bytes.end(), std::istreambuf_iterator<char>(file), {});
  }
  return bytes;
}

// Returns `count` sequences of `length` bytes from random places of the text. The same key always draws the same ones, also after a
// restart.
std::vector<std::uint8_t> draw(std::span<const std::uint8_t> text, std::uint64_t key, std::size_t count,
                               std::size_t length) {
  require(length <= text.size(), Code::bad_argument, [&] {
    return Problem{.what = "cannot train: the text is shorter than a sequence",
                   .needed = fmt::format("{} bytes", length),
                   .available = fmt::format("{} bytes", text.size()),
                   .remedy = "name more files, or choose a shorter context"};
  });
  std::vector<std::uint8_t> drawn;
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto sequence = text.subspan(more_noise(key, i) % (text.size() - length + 1), length);
    drawn.insert(drawn.end(), sequence.begin(), sequence.end());
  }
  return drawn;
}

class Run {
 public:
  Run(const RunOptions& options, Communicator& world, Maths& maths, Observer& observer)
      : options_(options), world_(world), maths_(maths), observer_(observer), text_(text_of(options.text)) {
    check(options.shape);
    draw(text_, 0, 1, options.shape.context + 1);  // throws if the text is too short
    begin();
    training_.emplace(model_of(options.shape), world, rules_of(options), options.training);
    model_.emplace(options.shape, options.batch, maths, accounts_);
    training_->start(initial_parameters(options.shape, options.seed, std::max(1, options.training.threads)));
    if (!options.checkpoint.empty() && !training_->found())
      (void)training_->load(options.checkpoint);  // if there is one
  }

  void all_steps() {
    last_step_ended_ = now();
    for (std::uint64_t step = training_->steps(); step < options_.steps; ++step) {
      observer_.step(one_step(step));
    }
    training_->finish();
    if (!options_.checkpoint.empty()) training_->save(options_.checkpoint);
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
    const Plan plan(model_of(options_.shape), {world_.rank(), world_.size(), world_.ranks_per_host()},
                    rules_of(options_), options_.training);
    Start start{.ranks = world_.size(),
                .parameters = parameters_of(plan.model()),
                .text_bytes = text_.size(),
                .library = maths_.library(),
                .ledger = plan.ledger(),
                .needs = needs_of(options_, plan),
                .drive_work = drive_work_of(plan.compiled())};
    require_enough(start.needs, options_, plan);
    world_.barrier();  // all ranks measure at the same time, as they compute later
    if (options_.measures_rate) matrix_rate_ = measure_matrix_rate(maths_, options_.shape.dtype);
    if (options_.forecasts) start.forecast = forecast(options_, plan, world_, maths_);
    start.matrix_rate = mean_of_ranks(matrix_rate_) * static_cast<double>(world_.size());
    start.most_resident = resident_memory().peak;
    forget_peak();
    world_.barrier();  // the ranks of a process have one peak
    observer_.begin(start);
  }

  Step one_step(std::uint64_t number) {
    const double begin = now();
    double loss = 0;
    for (std::uint64_t micro = 0; micro < options_.training.micro_steps; ++micro) {
      const std::uint64_t key = noise({options_.seed, number, micro, world_.rank()});
      loss += model_->run(*training_, draw(text_, key, options_.batch, options_.shape.context + 1));
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
    step.bytes[static_cast<std::size_t>(Tier::device)] += accounts_.total(maths_.memory()).now;
    require_kept(step.resident, options_.memory);
    rate(step, computed);
    return step;
  }

  // `computed`: seconds from the first forward to the last backward, including waiting.
  void rate(Step& step, double computed) const {
    const auto tokens = static_cast<double>(options_.batch * options_.shape.context * options_.training.micro_steps);
    step.tokens_per_second = tokens * static_cast<double>(world_.size()) / step.seconds;
    if (matrix_rate_ == 0) return;
    const double model_operations = tokens * operations_of_token(options_.shape);
    const double again = tokens * recomputed_operations_of_token(options_.shape);
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
    maths_.download(tensor, bytes);
    const ConstView read(bytes.data(), tensor.count(), tensor.dtype());
    for (std::size_t i = 0; i < read.count(); ++i) {
      const float value = number(read, i);
      end.parameters_hash = noise({end.parameters_hash, std::bit_cast<std::uint32_t>(value)});
      if (options_.keeps_parameters) end.parameters.push_back(value);
    }
  }

  const RunOptions& options_;
  Communicator& world_;
  Maths& maths_;
  Observer& observer_;
  std::vector<std::uint8_t> text_;
  MemoryAccounts accounts_;
  std::optional<Training> training_{};
  std::optional<Gpt> model_{};
  double matrix_rate_ = 0;  // this rank's rate
  double last_step_ended_ = 0;
};

}  // namespace

void train(const RunOptions& options, Communicator& world, Maths& maths, Observer& observer) {
  Run run(options, world, maths, observer);
  run.all_steps();
  run.end();
}

}  // namespace ballast::gpt
