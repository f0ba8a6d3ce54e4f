#include <ballast/error.h>

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/suite.h"
#include "benchmarks/offload/contest.h"
#include "benchmarks/offload/update.h"
#include "kernels/runtime/sizes.h"
#include "offload/io_queue.h"

namespace ballast::benchmarks {
namespace {

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
    const std::size_t of_file = tile / files_.size();
    const bool reads = direction == Direction::read || (direction == Direction::both && of_file % 2 == 0);
    under_way.push_back(queues_[file]->submit(
        {reads ? offload::IoKind::read : offload::IoKind::write, files_[file].get(), of_file * tile_bytes,
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
