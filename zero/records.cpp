#include "zero/records.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <sstream>

#include "offload/sealed_text.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/plan/description.h"

namespace ballast {
namespace {

constexpr std::string_view description_title = "Ballast run description, version 1";

void write_description(const std::filesystem::path& file, const std::vector<std::string>& lines) {
  offload::write_sealed_text(file, fmt::format("{}\n{}\n", description_title, fmt::join(lines, "\n")));
}

// Returns no lines if the file is missing or damaged.
std::vector<std::string> read_description(const std::filesystem::path& file) {
  std::istringstream text(offload::read_sealed_text(file).value_or(""));
  std::string line;
  if (!std::getline(text, line) || line != description_title) return {};
  std::vector<std::string> lines;
  while (std::getline(text, line))
    lines.push_back(line);
  return lines;
}

// Never returns 0, which means no run.
std::uint64_t random_id() {
  std::uint64_t id = 0;
  while (id == 0) {
    const ssize_t drawn = ::getrandom(&id, sizeof id, 0);
    require(drawn == sizeof id || errno == EINTR, Code::internal,
            [] { return Problem{.what = "cannot draw a random number for a new run"}; });
  }
  return id;
}

// Returns the history of every rank, by rank.
std::vector<RankHistory> histories_of_all(Communicator& world, const RankHistory& mine) {
  constexpr std::size_t most_commits = 2;
  constexpr std::size_t words = 4 + 3 * most_commits;
  std::vector<std::int64_t> words_of_ranks(words * world.size());
  auto word = words_of_ranks.begin() + static_cast<std::ptrdiff_t>(words * world.rank());
  *word++ = mine.has_files ? 1 : 0;
  *word++ = std::bit_cast<std::int64_t>(mine.run_id);
  *word++ = mine.lacks_records ? 1 : 0;
  *word++ = static_cast<std::int64_t>(mine.commits.size());
  for (const auto& [point, step] : mine.commits) {
    for (const std::uint64_t each : {point.incarnation, point.number, step})
      *word++ = static_cast<std::int64_t>(each);
  }
  world.all_reduce(words_of_ranks);
  std::vector<RankHistory> ranks;
  const auto number = [&](std::size_t at) { return static_cast<std::uint64_t>(words_of_ranks[at]); };
  for (std::size_t at = 0; at < words_of_ranks.size(); at += words) {
    RankHistory& rank = ranks.emplace_back(RankHistory{
        .has_files = words_of_ranks[at] != 0, .run_id = number(at + 1), .lacks_records = words_of_ranks[at + 2] != 0});
    for (std::size_t commit = 0; commit < std::min<std::uint64_t>(number(at + 3), most_commits); ++commit) {
      const std::size_t begin = at + 4 + 3 * commit;
      rank.commits.push_back({.point = {number(begin), number(begin + 1)}, .step = number(begin + 2)});
    }
  }
  return ranks;
}

std::uint64_t drawn_by_first(Communicator& world) {
  std::int64_t id = world.rank() == 0 ? std::bit_cast<std::int64_t>(random_id()) : 0;
  world.all_reduce({&id, 1});
  return std::bit_cast<std::uint64_t>(id);
}

std::filesystem::path directory_in(const std::filesystem::path& drive, const std::string& run, std::size_t rank) {
  return drive / fmt::format("{}-rank-{}", run, rank);
}

bool is_true_on_any(Communicator& world, bool mine) {
  std::int64_t ranks = mine ? 1 : 0;
  world.all_reduce({&ranks, 1});
  return ranks > 0;
}

}  // namespace

// The name becomes part of the name of a directory, which lies in the one that the caller names.
void require_run_name(const std::string& run) {
  constexpr std::size_t most = 200;  // bytes: file systems allow 255, and the rank follows
  const bool is_name = run.size() <= most && !run.empty() && run.front() != '.' &&
                       std::ranges::none_of(run, [](unsigned char letter) { return letter == '/' || letter < ' '; });
  require(is_name, Code::bad_argument, [&] {
    return Problem{.what = "cannot keep a run of this name: it is no name of a directory",
                   .where = fmt::format("run \"{}\"", run.substr(0, most)),
                   .needed = fmt::format("at most {} bytes without /, not beginning with a dot", most)};
  });
}

std::size_t tile_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  std::vector<std::int64_t> of_ranks(world.size());
  const auto drive = directory_in(options.directories.front(), options.run, world.rank());
  of_ranks[world.rank()] = static_cast<std::int64_t>(largest_tile(read_description(drive / description_name)));
  world.all_reduce(of_ranks);
  return static_cast<std::size_t>(std::ranges::max(of_ranks));
}

Records::Records(const CompiledPlan& plan, Communicator& world, const RecordOptions& options) {
  require(!options.directories.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot keep state on drives: there are no directories",
                   .needed = "the directories to keep it in"};
  });
  require(options.run.empty() || plan.blocks().full_records(), Code::internal,
          [] { return Problem{.what = "cannot keep a run: its records lack the parameters"}; });
  offload::RecordShape shape = plan.blocks().shape(plan.tiles_on_drive());
  shape.rank = static_cast<std::uint32_t>(world.rank());
  const offload::StoreOptions files{.file = {.allow_network = options.allow_network}, .log = options.log};
  if (options.run.empty()) {
    for (const std::filesystem::path& directory : options.directories)
      add_drive(directory, options);
    store_.emplace(offload::RecordStore::scratch(shape, drives_, files));
  } else {
    require_run_name(options.run);
    Run run{options.run, describe(plan), shape, files};
    run.shape.content_digest = digest_of(run.description);
    open_run(std::move(run), world, options);
  }
}

void Records::add_drive(const std::filesystem::path& directory, const RecordOptions& options) {
  queues_.push_back(offload::open_queue({.depth = options.depth, .log = options.log}));
  drives_.push_back({directory, queues_.back().get()});
}

void Records::open_run(Run run, Communicator& world, const RecordOptions& options) {
  RankHistory mine;
  on_all_ranks(world, [&] {
    for (const std::filesystem::path& directory : options.directories) {
      std::filesystem::create_directories(directory);
      add_drive(kept_.emplace_back(directory_in(directory, options.run, world.rank())).path(), options);
    }
    mine = look(run);
  });
  const std::vector<RankHistory> ranks = histories_of_all(world, mine);
  const auto known_id = run_id_of(ranks, run.name);
  common_point(ranks, run.name);  // throws before anything is written
  run.shape.run_id = known_id ? *known_id : drawn_by_first(world);
  on_all_ranks(world, [&] { open_or_create(run, mine.has_files); });
  const auto point = go_to_common_point(run, mine, world);
  found_ = point.has_value();
  const std::uint64_t incarnation = next_incarnation(ranks);
  store_->count_from({incarnation, found_ ? point->number : 0});
  if (options.log == nullptr || world.rank() > 0) return;
  options.log->info(
      found_ ? fmt::format("resumes run \"{}\" ({:#x}) after step {}: commit {} of incarnation {}; this is "
                           "incarnation {}",
                           run.name, run.shape.run_id, store_->step(), point->number, point->incarnation, incarnation)
             : fmt::format("begins run \"{}\" ({:#x}), incarnation {}", run.name, run.shape.run_id, incarnation));
}

// Returns the history of the run on this rank's drives. Throws if a different training began it, or if it belongs to
// another rank.
RankHistory Records::look(const Run& run) const {
  const auto found = offload::RecordStore::look(drives_, run.files);
  if (!found) return {};
  require(found->shape.rank == run.shape.rank, Code::run_mismatch, [&] {
    return Problem{
        .what = fmt::format("cannot resume run \"{}\": this is the directory of rank {}", run.name, found->shape.rank),
        .where = drives_.front().directory.string(),
        .needed = fmt::format("that of rank {}", run.shape.rank),
        .remedy = "Give every rank its own directories. Nothing was changed."};
  });
  if (found->shape.content_digest == run.shape.content_digest) return history_of(found);
  const std::vector<std::string> began_with = read_description(description_file());
  const bool is_known = digest_of(began_with) == found->shape.content_digest;
  const auto difference = first_difference(began_with, run.description);
  fail(Code::run_mismatch,
       {.what = is_known && difference ? fmt::format("cannot resume run \"{}\": it has {}, but this training has {}",
                                                     run.name, difference->one, difference->other)
                                       : fmt::format("cannot resume run \"{}\": another training began it", run.name),
        .where = is_known ? drives_.front().directory.string()
                          : fmt::format("{} (the difference is unknown: {} is missing or damaged)",
                                        drives_.front().directory.string(), description_file().filename().string()),
        .remedy = "Resume with the training that began the run; or give the run another name, where "
                  "ballast.load_checkpoint() takes over a checkpoint of other ranks, stages and formats. Nothing was "
                  "changed."});
}

// Writes the description first: files without one would be refused without a reason.
void Records::open_or_create(const Run& run, bool has_files) {
  if (!has_files || read_description(description_file()) != run.description) {
    write_description(description_file(), run.description);
  }
  store_.emplace(has_files ? offload::RecordStore::open(run.shape, drives_, run.files)
                           : offload::RecordStore::create(run.shape, drives_, run.files));
}

// A commit can exist without all of its records, so this takes the newest one whose records no rank lacks.
std::optional<offload::CommitPoint> Records::go_to_common_point(const Run& run, RankHistory mine, Communicator& world) {
  while (true) {
    const auto point = common_point(histories_of_all(world, mine), run.name);
    if (!point) return {};
    const bool is_here = store_->go_to(*point);
    if (!is_here) mine.drop(*point);
    if (!is_true_on_any(world, !is_here)) return point;
  }
}

std::vector<offload::IoQueue*> Records::queues() const {
  std::vector<offload::IoQueue*> queues;
  for (const auto& queue : queues_)
    queues.push_back(queue.get());
  return queues;
}

}  // namespace ballast
