// A GPT trainer on Ballast's C++ API.
#include <ballast/comm.h>

#include <fmt/format.h>
#include <malloc.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <thread>

#include "examples/gpt/options.h"
#include "examples/gpt/report.h"
#include "kernels/runtime/cores.h"
#include "kernels/runtime/stream.h"
#include "zero/comm/launch.h"

namespace ballast::gpt {
namespace {

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

// A rank with its own device and threads. `ranks_here` ranks share the cores of this machine.
class Rank {
 public:
  Rank(const ProgramOptions& options, std::size_t ranks_here) : run_(options.run) {
    const auto share = std::max<std::size_t>(1, usable_cores() / ranks_here);
    threads_ = options.threads > 0 ? options.threads : static_cast<int>(share);
    run_.training.threads = threads_;
    run_.hashes_parameters = !options.losses.empty();
    run_.keeps_parameters = !options.save.empty();
    run_.memory.ranks_here = options.ranks;
    run_.training.keeps_timeline = !options.timeline.empty();
    if (run_.training.gpu) stream_.emplace(*run_.training.gpu);
    if (stream_) run_.training.stream = stream_->handle();
  }

  int threads() const { return threads_; }

  void train(Communicator& world, Observer& observer) {
    const auto maths = stream_ ? gpu_maths(stream_->handle(), stream_->gpu()) : cpu_maths(threads_);
    gpt::train(run_, world, *maths, observer);
  }

 private:
  RunOptions run_;
  int threads_ = 1;
  std::optional<Stream> stream_{};
};

void train_on_threads(const ProgramOptions& options) {
  const auto ranks = thread_ranks(options.ranks);
  Printer printer(options);
  std::mutex mutex;
  std::exception_ptr first_failure;
  const auto as_rank = [&](std::size_t rank) {
    try {
      Rank own(options, options.ranks);
      Observer silent;
      own.train(*ranks[rank], rank == 0 ? printer : silent);
    } catch (const std::exception& failure) {
      const std::lock_guard lock(mutex);
      if (!first_failure) first_failure = std::current_exception();
      ranks[rank]->abort(failure.what());
    }
  };
  std::vector<std::thread> others;
  for (std::size_t rank = 1; rank < options.ranks; ++rank) {
    others.emplace_back(as_rank, rank);
  }
  as_rank(0);
  for (std::thread& other : others) {
    other.join();
  }
  if (first_failure) std::rethrow_exception(first_failure);
}

void train_launched(ProgramOptions options, const Launch& launch) {
  require(options.ranks == 1, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use --ranks in a process that {} started", launch.launcher),
                   .remedy = "leave --ranks out, or start only one process"};
  });
  if (options.run.training.gpu) options.run.training.gpu = static_cast<int>(launch.local_rank);
  Rank own(options, launch.size);
  const auto world = connect({.threads = own.threads()});
  Observer silent;
  std::optional<Printer> printer;
  if (launch.rank == 0) printer.emplace(options);
  own.train(*world, printer ? *printer : silent);
}

// By default glibc keeps more and more of the freed memory, in each thread: megabytes that no ledger counts.
void give_freed_memory_back() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 1 << 19);
  mallopt(M_TRIM_THRESHOLD, 1 << 17);
}

void run(ProgramOptions options) {
  give_freed_memory_back();
  MemoryOptions& memory = options.run.memory;
  memory.before = resident_memory();
  if (memory.limit) limit_own_memory(*memory.limit);
  const Launch launch = launch_from(Environment());
  launch.size > 1 ? train_launched(options, launch) : train_on_threads(options);
}

}  // namespace
}  // namespace ballast::gpt

int main(int argc, char** argv) {
  CLI::App app{"Trains a GPT on any text with Ballast"};
  ballast::gpt::ProgramOptions options;
  ballast::gpt::describe(app, options);
  try {
    app.parse(argc, argv);
    ballast::gpt::run(options);
    return 0;
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : 2;
  } catch (const std::bad_alloc&) {  // malloc gives no more information
    fmt::print(stderr, "{}\n",
               ballast::Error(ballast::Code::host_memory, {.what = "malloc has no more memory"}, ballast::Site::here())
                   .what());
    return 2;
  } catch (const std::exception& problem) {
    fmt::print(stderr, "{}\n", problem.what());
    return 2;
  }
}
