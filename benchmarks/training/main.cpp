// Trains a Llama of a chosen shape: memory, time and forecast of its steps, as lines of text and of JSON.
#include <ballast/comm.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <utility>

#include "benchmarks/training/options.h"
#include "kernels/runtime/machine.h"
#include "kernels/runtime/sizes.h"
#include "zero/comm/connect.h"

namespace ballast::benchmarks {
namespace {

// --- The output of the program, as text ---

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

template <typename Amount>
Amount drive_amount(const std::array<Amount, lane_count>& by_lane) {
  return by_lane[static_cast<std::size_t>(Lane::disk)] + by_lane[static_cast<std::size_t>(Lane::fetch)];
}

std::string tiers(const TierBytes& bytes) {
  std::string text;
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (bytes[tier] == 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : "  ", name(static_cast<Tier>(tier)), human_bytes(bytes[tier]));
  }
  return text;
}

// The first step warms up; it counts only if it is the only one.
double typical(std::span<const Step> steps, double Step::*field) {
  std::vector<double> values;
  for (const Step& step : steps.subspan(steps.size() > 1 ? 1 : 0)) {
    values.push_back(step.*field);
  }
  return median(std::move(values));
}

std::string forecast_text(const Forecast& forecast) {
  const Machine& machine = forecast.machine;
  const Simulation& step = forecast.step;
  std::string text =
      fmt::format("\nrates     gather {:.1f}, reduce {:.1f}, copies {:.1f}, updates {:.1f}", machine.gather / 1e9,
                  machine.reduce / 1e9, machine.upload / 1e9, machine.host_memory / 1e9);
  if (machine.read > 0)
    text += fmt::format(", drives {:.1f} to read and {:.1f} to write", machine.read / 1e9, machine.write / 1e9);
  text += fmt::format(" GB/s for each rank\nforecast  a step takes {:.3f} s, including {:.3f} s of waiting",
                      step.seconds, sum(step.exposed));
  if (const std::size_t moved = drive_amount(step.bytes); moved > 0) {
    text += fmt::format("; drives move {}", human_bytes(moved));
  }
  return text;
}

std::string needs_text(const RunOptions& options, const Needs& needs) {
  std::string text =
      fmt::format("\nprocess   {} will be resident, including {} for activations and {} for libraries",
                  human_bytes(needs.memory()), human_bytes(needs.activations), human_bytes(needs.libraries));
  if (options.memory.limit) {
    text += fmt::format("; the kernel enforces a limit of {}, libraries included", human_bytes(*options.memory.limit));
  }
  for (const Needs::Drive& drive : needs.drives) {
    text += fmt::format("\ndrive     {}: {} are free; the run takes {} on all drives", drive.directory.string(),
                        human_bytes(drive.available), human_bytes(needs.on_drives));
  }
  return text;
}

// Compares with the drives alone, which were measured with the same bytes to read and to write.
std::string drive_text(const Simulation& forecast, std::span<const Step> steps) {
  const double seconds = typical(steps, &Step::seconds);
  const auto bytes = static_cast<double>(drive_amount(steps.back().metrics.bytes));
  const double alone = static_cast<double>(drive_amount(forecast.bytes)) / drive_amount(forecast.busy);
  return fmt::format("\ndrives    {:.2f} GB in a step, {:.2f} GB/s; {:.2f} GB/s when measured alone", bytes / 1e9,
                     bytes / seconds / 1e9, alone / 1e9);
}

std::string resident_text(const Step& last, const RunOptions& options, const Start& start) {
  const double more = excess(last.resident, start.needs, options.memory) * 100;
  const std::size_t peak = std::max(start.most_resident, last.resident.peak);
  return fmt::format(
      "\nresident  {} at the peak, including {} of libraries' code; without that and the memory at the start, {:.1f} % {} "
      "than announced\n",
      human_bytes(peak), human_bytes(last.resident.of_files), std::abs(more), more < 0 ? "less" : "more");
}

std::string beginning(const RunOptions& options, const Start& start) {
  const llama::Config& model = options.model;
  const std::size_t micro_steps = options.training.micro_steps;
  std::string text = fmt::format("model     {} layers, width {}, {} heads, context {}, {}: {:.2f} million parameters\n",
                                 model.layers, model.hidden, model.heads, options.batch.context, name(model.dtype),
                                 static_cast<double>(start.parameters) / 1e6);
  text += fmt::format("step      {} ranks x {} micro-steps x {} sequences = {} tokens\n", start.ranks, micro_steps,
                      options.batch.sequences, start.ranks * micro_steps * options.batch.positions());
  text += fmt::format("matrices  {}", start.library);
  if (start.matrix_rate > 0) {
    text += fmt::format(": {:.0f} GFLOP/s in {} on all ranks", start.matrix_rate / 1e9, name(model.dtype));
  }
  if (start.forecast) text += forecast_text(*start.forecast);
  text += needs_text(options, start.needs);
  text += fmt::format("\nmemory that this rank will reserve in stage {}, without activations:\n{}",
                      options.training.stage, to_text(start.ledger));
  return text;
}

std::string step_heading() {
  return fmt::format("{:>6} {:>8} {:>9} | {:>9} {:>6} | memory of rank 0\n", "step", "loss", "grad_norm", "tok/s",
                     "mfu");
}

std::string step_line(const Step& step) {
  const std::string mfu = step.mfu > 0 ? fmt::format("{:.1f}%", step.mfu * 100) : "-";
  std::string text =
      fmt::format("{:>6} {:>8.4f} {:>9.4f} | {:>9.0f} {:>6} | {} | exposed {:.0f} ms\n", step.step, step.loss,
                  step.norm, step.tokens_per_second, mfu, tiers(step.bytes), sum(step.metrics.exposed) * 1e3);
  if (!step.skipped.empty()) text += fmt::format("       skipped: {}\n", step.skipped);
  return text;
}

std::string ending(std::span<const Step> steps, const RunOptions& options, const Start& start) {
  if (steps.empty()) return "there are no steps left\n";
  std::string text = fmt::format("median of {} steps: {:.0f} tokens/s", steps.size() > 1 ? steps.size() - 1 : 1,
                                 typical(steps, &Step::tokens_per_second));
  if (start.matrix_rate > 0) {
    text += fmt::format(", forward and backward at {:.0f} % of the matrix rate, mfu {:.1f} %",
                        typical(steps, &Step::matrix_use) * 100, typical(steps, &Step::mfu) * 100);
  }
  if (start.forecast) {
    const double seconds = typical(steps, &Step::seconds);
    text += fmt::format("\na step took {:.3f} s, {:.2f} times the forecast", seconds,
                        seconds / start.forecast->step.seconds);
    if (!start.needs.drives.empty()) text += drive_text(start.forecast->step, steps);
  }
  text += fmt::format("\nheld      {}", tiers(steps.back().bytes));
  if (!start.on_gpu) text += resident_text(steps.back(), options, start);
  return text;
}

std::string json_line(const Step& step, const RunOptions& options, const Start& start) {
  nlohmann::ordered_json line{{"step", step.step},
                              {"loss", step.loss},
                              {"grad_norm", step.norm},
                              {"seconds", step.seconds},
                              {"tokens_per_second", step.tokens_per_second},
                              {"mfu", step.mfu},
                              {"matrix_use", step.matrix_use}};
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    line["bytes"][std::string(name(static_cast<Tier>(tier)))] = step.bytes[tier];
  }
  constexpr const char* phases[] = {"forward", "backward", "step"};
  for (std::size_t phase = 0; phase < phase_count; ++phase) {
    line["exposed_seconds"][phases[phase]] = step.metrics.exposed[phase];
  }
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    if (step.metrics.bytes[lane] == 0) continue;
    const std::string of(name(static_cast<Lane>(lane)));
    line["lanes"][of] = {{"bytes", step.metrics.bytes[lane]},
                         {"busy_seconds", step.metrics.busy[lane]},
                         {"waited_for_seconds", step.metrics.stalls[lane]}};
  }
  line["resident"] = {{"peak_bytes", step.resident.peak},
                      {"code_bytes", step.resident.of_files},
                      {"before_bytes", options.memory.before.now - options.memory.before.of_files},
                      {"announced_bytes", start.needs.memory()}};
  line["parameters"] = start.parameters;
  if (const DriveWork& work = start.drive_work; work.record_bytes > 0) {
    line["drive"] = {{"read_bytes", work.read_bytes},
                     {"written_bytes", work.written_bytes},
                     {"record_bytes", work.record_bytes},
                     {"records", work.records}};
  }
  if (start.forecast) {
    line["forecast_seconds"] = start.forecast->step.seconds;
    line["forward_share"] = start.forecast->forward_share;
  }
  if (!step.skipped.empty()) line["skipped"] = step.skipped;
  return line.dump() + "\n";
}

// Keeps the bits of loss and norm.
std::string exact_line(const Step& step) { return fmt::format("{} {:a} {:a}\n", step.step, step.loss, step.norm); }

// --- The program ---

// Writes the observations of rank 0 to the terminal and into files.
class Printer : public Observer {
 public:
  explicit Printer(const ProgramOptions& options) : options_(options) {
    open(losses_, options.losses);
    open(json_, options.json);
    open(timeline_, options.timeline);
    open(saved_, options.save);
  }

  void begin(const Start& start) override {
    start_ = start;
    print(beginning(options_.run, start));
    print(step_heading());
  }

  void step(const Step& step) override {
    steps_.push_back(step);
    print(step_line(step));
    if (losses_.is_open()) losses_ << exact_line(step) << std::flush;
    if (json_.is_open()) json_ << json_line(step, options_.run, start_) << std::flush;
  }

  void end(const End& end) override {
    print(ending(steps_, options_.run, start_));
    if (losses_.is_open()) losses_ << fmt::format("parameters {:016x}\n", end.parameters_hash);
    if (timeline_.is_open()) timeline_ << end.trace;
    const auto bytes = static_cast<std::streamsize>(end.parameters.size() * sizeof(float));
    if (saved_.is_open()) saved_.write(reinterpret_cast<const char*>(end.parameters.data()), bytes);
  }

 private:
  static void print(const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);
  }

  static void open(std::ofstream& file, const std::filesystem::path& path) {
    if (path.empty()) return;
    file.open(path, std::ios::binary);
    require(file.is_open(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot write {}", path.string()), .needed = "a file in a directory"};
    });
  }

  const ProgramOptions& options_;
  Start start_{};
  std::vector<Step> steps_{};
  std::ofstream losses_, json_, timeline_, saved_;
};

int threads_of(const ProgramOptions& options, std::size_t ranks_here) {
  const auto share = std::max<std::size_t>(1, usable_cores() / ranks_here);
  return options.threads > 0 ? options.threads : static_cast<int>(share);
}

void train_rank(const ProgramOptions& options, Communicator& world) {
  RunOptions run = options.run;
  run.training.threads = threads_of(options, world.size());
  run.hashes_parameters = !options.losses.empty();
  run.keeps_parameters = !options.save.empty();
  run.memory.ranks_here = options.ranks;
  run.training.keeps_timeline = !options.timeline.empty();
  Observer silent;
  std::optional<Printer> printer;
  if (world.rank() == 0) printer.emplace(options);
  try {
    const auto maths = options.on_gpu ? llama::gpu_maths(world.rank()) : llama::cpu_maths(run.training.threads);
    train(run, world, *maths, printer ? *printer : silent);
  } catch (const std::bad_alloc&) {  // malloc gives no more information
    fail(Code::host_memory, {.what = "malloc has no more memory"});
  }
}

int run(ProgramOptions options) {
  MemoryOptions& memory = options.run.memory;
  memory.before = resident_memory();
  if (memory.limit) limit_own_memory(*memory.limit);
  const Launch launch = launch_from(Environment());
  require(launch.size == 1 || options.ranks == 1, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use --ranks in a process that {} started", launch.launcher),
                   .remedy = "leave --ranks out, or start only one process"};
  });
  const auto as_rank = [&](Communicator& world) { train_rank(options, world); };
  return run_ranks(options.ranks, as_rank, {.threads = threads_of(options, launch.size)}) == 0 ? 0 : 2;
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  CLI::App app{"Trains a Llama, and reports the memory, the time and the forecast of its steps"};
  ballast::benchmarks::ProgramOptions options;
  ballast::benchmarks::describe(app, options);
  try {
    app.parse(argc, argv);
    return ballast::benchmarks::run(options);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : 2;
  } catch (const std::exception& problem) {
    fmt::print(stderr, "{}\n", problem.what());
    return 2;
  }
}
