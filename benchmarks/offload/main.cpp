#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/suite.h"
#include "benchmarks/offload/update.h"
#include "kernels/runtime/sizes.h"
#include "offload/io_queue.h"

namespace ballast::benchmarks {
namespace {

// --- Contests between contenders that report their own times. External programs can take part, without their time to start: fio,
// which measures the limit of a drive, and DeepSpeed's async_io ---

struct Sample {
  double seconds = 0;
  double cpu_seconds = 0;
};

struct Contender {
  std::string name;
  std::function<Sample()> run;
};

struct Contest {
  std::string name;
  double gigabytes;  // moved by one run of each
  Contender ours;
  Contender theirs;
  bool compares_cpu = false;  // adds a line with the gigabytes that a second of processor time moves
  // Called three times between rounds. The position of a file on the drive changes its speed by up to a tenth, so this
  // makes the files anew, and swaps those of the two contenders.
  std::function<void()> renew{};
};

constexpr std::size_t layouts = 4;  // layouts of files; an even number, so that half of them are in each order

double cpu_seconds() {
  struct rusage used {};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Returns the wall-clock time of a run, and the processor time of the whole process.
Sample timed(const std::function<void()>& run) {
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return {took.count(), cpu_seconds() - cpu};
}

// Runs both contenders in turn, round by round. Writes one or two lines of JSON to stdout.
void run_contest(const Contest& contest, std::size_t rounds) {
  Rates ours, theirs, our_cpu, their_cpu;
  const std::size_t in_a_row = (rounds + layouts - 1) / layouts + 1;  // one of them to warm up
  for (std::size_t round = 0; round < layouts * in_a_row; ++round) {
    if (contest.renew && round > 0 && round % in_a_row == 0) contest.renew();
    const Sample us = contest.ours.run();
    const Sample them = contest.theirs.run();
    if (round % in_a_row == 0) continue;
    ours.push_back(contest.gigabytes / us.seconds);
    theirs.push_back(contest.gigabytes / them.seconds);
    our_cpu.push_back(contest.gigabytes / us.cpu_seconds);
    their_cpu.push_back(contest.gigabytes / them.cpu_seconds);
  }
  emit("offload", contest.name, "GB/s", ours, contest.theirs.name, theirs);
  if (!contest.compares_cpu) return;
  emit("offload", contest.name + ", by CPU time", "GB/CPU s", our_cpu, contest.theirs.name, their_cpu);
}

// Runs a shell command to its end, and returns its standard output.
std::string output_of(const std::string& command) {
  struct Close {
    void operator()(std::FILE* pipe) const { ::pclose(pipe); }
  };
  const std::unique_ptr<std::FILE, Close> pipe(::popen(command.c_str(), "r"));
  std::string text;
  std::array<char, 4096> part{};
  while (const std::size_t read = std::fread(part.data(), 1, part.size(), pipe.get())) {
    text.append(part.data(), read);
  }
  return text;
}

// fio with the same file, block size and depth, and direct I/O.
struct FioJob {
  std::vector<std::filesystem::path> files;
  std::string direction;  // "read", "write", "rw"
  std::size_t block_bytes = 0;
  std::size_t depth = 0;
  std::size_t bytes = 0;  // bytes of all files together
};

const std::map<std::string, std::string> engines{
    {"io_uring", "--ioengine=io_uring --fixedbufs=1 --registerfiles=1"},
    {"libaio", "--ioengine=libaio"},
    {"threads", "--ioengine=psync --thread=1"},
};

std::string command(const FioJob& job, const std::string& engine) {
  std::vector<std::string> names;
  for (const auto& file : job.files) {
    names.push_back(file.string());
  }
  // Threads have one request each, and share the work: each has its own part of the files.
  const std::string work = engine == "threads"
                               ? fmt::format("--numjobs={} --size={} --offset_increment={}", job.depth,
                                             job.bytes / job.depth, job.bytes / job.depth / job.files.size())
                               : fmt::format("--iodepth={} --size={}", job.depth, job.bytes);
  // Huge pages under its buffers too: drives take fewer and longer requests from them.
  return fmt::format(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=job --filename={} --rw={} --bs={} {} {} --direct=1 "
      "--overwrite=1 --scramble_buffers=0 --allow_file_create=0 --fallocate=none --group_reporting --output-format=json 2>/dev/null",
      fmt::join(names, ":"), job.direction, job.block_bytes, engines.at(engine), work);
}

bool has_fio() { return std::system("fio --version >/dev/null 2>&1") == 0; }

Sample run_fio(const FioJob& job, const std::string& engine) {
  const std::string text = output_of(command(job, engine));
  const auto begin = text.find('{');  // a warning may stand before it
  require(begin != std::string::npos, Code::internal,
          [&] { return Problem{.what = "fio failed", .where = command(job, engine)}; });
  const auto run = nlohmann::json::parse(text.substr(begin))["jobs"][0];
  double bytes = 0;
  double seconds = 0;
  for (const char* direction : {"read", "write"}) {
    bytes += run[direction]["io_bytes"].get<double>();
    seconds = std::max(seconds, run[direction]["runtime"].get<double>() * 1e-3);
  }
  // fio gives whole milliseconds, and the processor time as a part of them.
  const double cpu = (run["usr_cpu"].get<double>() + run["sys_cpu"].get<double>()) / 100;
  const double scale = static_cast<double>(job.bytes) / bytes;
  const double jobs = engine == "threads" ? static_cast<double>(job.depth) : 1;
  return {seconds * scale, seconds * cpu * jobs * scale};
}

// Returns fio's fastest engine for the job on this machine: io_uring with registered buffers and files, libaio, or threads.
std::string best_engine(const FioJob& job) {
  std::string best;
  double least = 0;
  for (const auto& [engine, options] : engines) {
    const double seconds = std::min(run_fio(job, engine).seconds, run_fio(job, engine).seconds);
    if (best.empty() || seconds < least) {
      best = engine;
      least = seconds;
    }
  }
  return best;
}

// DeepSpeed's async_io in its own process, deepspeed_aio.py. `command` starts it, with its options.
Sample run_deepspeed(const std::string& command) {
  const std::string text = output_of(command + " 2>/dev/null");
  require(!text.empty(), Code::internal,
          [&] { return Problem{.what = "DeepSpeed's async_io could not be measured", .where = command}; });
  const auto sample = nlohmann::json::parse(text);
  return {sample["seconds"].get<double>(), sample["cpu_seconds"].get<double>()};
}

// --- The library's side ---

struct Options {
  std::filesystem::path directory = std::filesystem::current_path();
  std::size_t bytes = std::size_t{1} << 30;
  std::size_t depth = 16;
  std::size_t rounds = 12;
  std::string only{};
  std::string deepspeed{};
  bool list = false;
};

constexpr std::size_t mebibyte = std::size_t{1} << 20;
constexpr std::size_t tiles_of_a_run = 256;  // the fewest tiles
constexpr std::size_t largest_tile = std::size_t{16} << 20;

// Moves tiles through the library's queues, as many at once as a queue is deep: files of one size, one in each
// directory, written once, each with its own queue. The destructor removes them.
class Stretch {
 public:
  Stretch(const std::vector<std::filesystem::path>& directories, std::size_t bytes, std::size_t depth);
  ~Stretch();

  std::vector<std::filesystem::path> files() const;
  std::size_t bytes() const { return file_bytes_ * files_.size(); }

  enum class Direction { read, write, both };  // both: every second tile is written
  void move(Direction direction, std::size_t tile_bytes);

 private:
  std::size_t file_bytes_;
  std::size_t depth_;
  std::vector<std::unique_ptr<offload::File>> files_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  Buffer memory_;
};

Stretch::Stretch(const std::vector<std::filesystem::path>& directories, std::size_t bytes, std::size_t depth)
    : file_bytes_(round_up(bytes / directories.size(), largest_tile)),
      depth_(depth),
      memory_(directories.size() * depth * largest_tile) {
  for (const auto& directory : directories) {
    std::filesystem::create_directories(directory);
    files_.push_back(
        std::make_unique<offload::File>(directory / "ballast-benchmark", offload::FileOptions{.create = true}));
    queues_.push_back(offload::open_queue({.depth = depth}));
    queues_.back()->remember(memory_.as<std::byte>());
    queues_.back()->remember(*files_.back());
  }
  move(Direction::write, largest_tile);
}

Stretch::~Stretch() {
  for (const auto& file : files_) {
    std::error_code gone_already;
    std::filesystem::remove(file->path(), gone_already);
  }
}

std::vector<std::filesystem::path> Stretch::files() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : files_) {
    paths.push_back(file->path());
  }
  return paths;
}

// Tiles go to the files in turn. When all places in memory are in use, the loop waits for the older half. The drive
// stays busy with the other half, and threads wake each other once for many tiles.
void Stretch::move(Direction direction, std::size_t tile_bytes) {
  const std::size_t places = depth_ * files_.size();
  std::deque<offload::Completion> under_way;
  for (std::size_t tile = 0; tile < bytes() / tile_bytes; ++tile) {
    if (under_way.size() == places) {
      under_way[places / 2 - 1].wait();  // the last of them first: most others have ended by then
      for (std::size_t i = 0; i < places / 2; ++i) {
        under_way.front().wait();
        under_way.pop_front();
      }
    }
    const std::size_t file = tile % files_.size();
    const std::size_t tile_in_file = tile / files_.size();
    const bool reads = direction == Direction::read || (direction == Direction::both && tile_in_file % 2 == 0);
    under_way.push_back(queues_[file]->submit(
        {reads ? offload::IoKind::read : offload::IoKind::write, files_[file].get(), tile_in_file * tile_bytes,
         memory_.as<std::byte>().subspan(tile % places * tile_bytes, tile_bytes)}));
  }
  for (const offload::Completion& completion : under_way) {
    completion.wait();
  }
}

// A comparison. It is set up when it runs, so that only one at a time takes space on the drive.
struct Case {
  std::string name;
  std::string against;
  std::function<void(const Options&)> run;
  std::string line() const { return fmt::format("{}, vs. {}", name, against); }
};

struct Tiles {
  std::size_t bytes;
  Stretch::Direction direction;
  std::size_t directories = 1;

  std::string name() const {
    constexpr std::string_view directions[] = {"read", "write", "read and write"};
    return fmt::format("{} tiles of {} MiB{}", directions[static_cast<std::size_t>(direction)], bytes / mebibyte,
                       directories == 1 ? "" : fmt::format(", {} directories", directories));
  }
};

void versus_fio(const Tiles& tiles, const Options& options) {
  constexpr std::string_view directions[] = {"read", "write", "rw"};
  std::vector<std::filesystem::path> directories;
  for (std::size_t i = 0; i < tiles.directories; ++i) {
    directories.push_back(options.directory / fmt::format("ballast-benchmark-{}", i));
  }
  {
    // Large tiles move more bytes: the last requests and the start of fio's threads would be much of a short run.
    Stretch stretch(directories, std::max(options.bytes, tiles_of_a_run * tiles.bytes), options.depth);
    const FioJob job{.files = stretch.files(),
                     .direction = std::string(directions[static_cast<std::size_t>(tiles.direction)]),
                     .block_bytes = tiles.bytes,
                     .depth = options.depth * tiles.directories,
                     .bytes = stretch.bytes()};
    const std::string engine = best_engine(job);
    run_contest({.name = tiles.name(),
                 .gigabytes = static_cast<double>(stretch.bytes()) / 1e9,
                 .ours = {"ballast", [&] { return timed([&] { stretch.move(tiles.direction, tiles.bytes); }); }},
                 .theirs = {"fio, " + engine, [&] { return run_fio(job, engine); }},
                 .compares_cpu = true},
                options.rounds);
  }
  for (const auto& directory : directories) {
    std::filesystem::remove(directory);
  }
}

UpdateSetting setting(const Options& options) {
  return {.directory = options.directory,
          .state_bytes = options.bytes,
          .elements_of_tile = 128 * 1024,
          .depth = 2 * options.depth};  // half of them read while the others are written
}

void versus_deepspeed(const Options& options) {
  OffloadedUpdate update(setting(options));
  const TensorFiles files(options.directory / "ballast-benchmark-deepspeed", update.tiles(), update.tile_bytes());
  run_contest({.name = "tiles read and written",
               .gigabytes = update.gigabytes(),
               .ours = {"ballast", [&] { return timed([&] { update.drive_alone(); }); }},
               .theirs = {"DeepSpeed async_io",
                          [&] { return run_deepspeed(fmt::format("{} {}", options.deepspeed, files.options())); }},
               .compares_cpu = true},
              options.rounds);
}

void versus(const std::string& name, const std::string& against, void (OffloadedUpdate::*ours)(),
            void (OffloadedUpdate::*theirs)(), const Options& options) {
  UpdateSetting made = setting(options);
  made.tensor_files = theirs == &OffloadedUpdate::drained;
  std::optional<OffloadedUpdate> update(std::in_place, made);
  run_contest({.name = name,
               .gigabytes = update->gigabytes(),
               .ours = {"ballast", [&] { return timed([&] { ((*update).*ours)(); }); }},
               .theirs = {against, [&] { return timed([&] { ((*update).*theirs)(); }); }},
               .renew =
                   [&] {
                     update.reset();
                     made.ours_is_second = !made.ours_is_second;
                     update.emplace(made);
                   }},
              options.rounds);
}

// The tables: a new case is a line here.
std::vector<Case> cases() {
  using enum Stretch::Direction;
  std::vector<Case> all;
  for (const Tiles& tiles : {Tiles{1 * mebibyte, read}, Tiles{4 * mebibyte, read}, Tiles{16 * mebibyte, read},
                             Tiles{1 * mebibyte, write}, Tiles{4 * mebibyte, write}, Tiles{16 * mebibyte, write},
                             Tiles{4 * mebibyte, both}, Tiles{4 * mebibyte, read, 2}, Tiles{4 * mebibyte, write, 2},
                             Tiles{4 * mebibyte, read, 4}, Tiles{4 * mebibyte, write, 4}}) {
    all.push_back({tiles.name(), "fio", [tiles](const Options& options) { versus_fio(tiles, options); }});
  }
  using Update = OffloadedUpdate;
  const auto add = [&](const std::string& name, const std::string& against, void (Update::*ours)(),
                       void (Update::*theirs)()) {
    all.push_back({name, against, [=](const Options& options) { versus(name, against, ours, theirs, options); }});
  };
  add("adamw split from the drive", "drive alone", &Update::pipeline, &Update::drive_alone);
  add("adamw split from the drive", "no checksums", &Update::pipeline, &Update::without_seals);
  add("adamw split from the drive", "drained queue", &Update::pipeline, &Update::drained);
  all.push_back({"tiles read and written", "DeepSpeed async_io", versus_deepspeed});
  return all;
}

void describe(CLI::App& app, Options& options) {
  app.add_option("--directory", options.directory, "Directory on the drive to measure (the build folder)")
      ->check(CLI::ExistingDirectory)
      ->take_last();
  app.add_option("--bytes", options.bytes, "Bytes that a run reads or writes (1 GiB; more for large tiles)")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--depth", options.depth, "Requests in flight for each directory (16)")->check(CLI::Range(2, 1024));
  app.add_option("--rounds", options.rounds, "Timed rounds of each case, a multiple of 4 (12)")
      ->check(CLI::Range(1, 10000));
  app.add_option("--only", options.only, "Only the cases whose line in --list contains this text");
  app.add_option("--deepspeed", options.deepspeed,
                 "Command that starts DeepSpeed's side; without it, that case is skipped");
  app.add_flag("--list", options.list, "Name the cases and stop");
}

void run(const Options& options) {
  const bool fio = has_fio();
  for (const Case& item : cases()) {
    if (item.line().find(options.only) == std::string::npos) continue;
    if (options.list) {
      fmt::print("{}\n", item.line());
    } else if (item.against == "fio" && !fio) {
      fmt::print(stderr, "offload: skipped {}: fio is not installed\n", item.line());
    } else if (item.against == "DeepSpeed async_io" && options.deepspeed.empty()) {
      fmt::print(stderr, "offload: skipped {}: --deepspeed is not given\n", item.line());
    } else {
      item.run(options);
    }
  }
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  using namespace ballast::benchmarks;
  CLI::App app{"The drive tier, compared with what the drive can do"};
  Options options;
  describe(app, options);
  return run_program(app, argc, argv, [&] { run(options); });
}
