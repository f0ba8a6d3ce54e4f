#include "zero/runs/records.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "offload/drive_space.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/plan/description.h"
#include "zero/runs/takeover.h"

namespace ballast {
namespace {

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
  for (const auto& [point, step, label] : mine.commits) {
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

void require_directories(const RecordOptions& options) {
  require(!options.directories.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot keep state on drives: there are no directories",
                   .needed = "the directories to keep it in"};
  });
}

std::size_t tile_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  std::vector<std::int64_t> of_ranks(world.size());
  const std::filesystem::path& drive = options.directories.front();
  on_all_ranks(world, [&] {
    for (const RecordFiles& files : record_files_on(drive, options.run)) {
      if (files.rank != world.rank()) continue;
      const auto lines = read_run_description(files.directory(drive, options.run) / files.description_name());
      of_ranks[world.rank()] = std::max(of_ranks[world.rank()], static_cast<std::int64_t>(largest_tile(lines)));
    }
  });
  world.all_reduce(of_ranks);
  return static_cast<std::size_t>(std::ranges::max(of_ranks));
}

Records::Records(const CompiledPlan& plan, Communicator& world, const RecordOptions& options) {
  require_directories(options);
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
    OwnRun run{.plan = plan, .options = options, .description = describe(plan), .shape = shape, .files = files};
    run.shape.content_digest = digest_of(run.description);
    open_run(std::move(run), world);
  }
}

void Records::add_drive(const std::filesystem::path& directory, const RecordOptions& options) {
  queues_.push_back(offload::open_queue({.depth = options.depth, .log = options.log}));
  drives_.push_back({directory, queues_.back().get()});
}

void Records::open_run(OwnRun run, Communicator& world) {
  const RecordOptions& options = run.options;
  on_all_ranks(world, [&] {
    for (const std::filesystem::path& directory : options.directories) {
      std::filesystem::create_directories(directory);
      const RecordFiles files{.rank = run.rank()};
      add_drive(kept_.emplace_back(files.directory(directory, options.run)).path(), options);
    }
  });
  run.queues = queues();
  const SettledRun settled = settle_run(run, world);
  const RecordFiles& files = settled.files;
  lost_ = settled.lost;
  run.files.name = files.name();
  RankHistory mine;
  on_all_ranks(world, [&] { mine = look(run); });
  const std::vector<RankHistory> ranks = histories_of_all(world, mine);
  const auto known_id = run_id_of(ranks, run.name());
  common_point(ranks, run.name(), settled.last);  // throws before anything is written
  run.shape.run_id = known_id ? *known_id : drawn_by_first(world);
  on_all_ranks(world, [&] { open_or_create(run, files, mine.has_files); });
  const auto point = go_to_common_point(run, mine, settled.last, world);
  found_ = point.has_value();
  const std::uint64_t incarnation = next_incarnation(ranks);
  const offload::CommitPoint next{incarnation, found_ ? point->number : 0};
  if (options.mirror) {
    mirror_.emplace(run, files, world);
    mirror_->catch_up(*store_, point, next, world);
  }
  settled.remove_others(mirror_ ? mirror_->ranks_on_host() : std::vector<std::size_t>{});
  store_->count_from(next);
  if (options.log == nullptr || world.rank() > 0) return;
  options.log->info(
      found_ ? fmt::format("resumes run \"{}\" ({:#x}) after step {}: commit {} of incarnation {}; this is "
                           "incarnation {}",
                           run.name(), run.shape.run_id, store_->step(), point->number, point->incarnation, incarnation)
             : fmt::format("begins run \"{}\" ({:#x}), incarnation {}", run.name(), run.shape.run_id, incarnation));
}

// Returns the history of the run on this rank's drives, whose records are this training's.
RankHistory Records::look(const OwnRun& run) const {
  const auto found = offload::RecordStore::look(drives_, run.files);
  return found ? history_of(found) : RankHistory{};
}

// Its own records, and those that it mirrors: a drive that is too small is found before anything is written.
void Records::require_space_for_two(const OwnRun& run, const RecordFiles& files) const {
  std::vector<std::filesystem::path> directories;
  for (const offload::Drive& drive : run.drives(files))
    directories.push_back(drive.directory);
  offload::require_space(run.shape, directories, 2);
}

// Writes the description first: files without one would be refused without a reason. There was no other copy of files that are
// marked as damaged: if they are, a read will fail and mark them again.
void Records::open_or_create(const OwnRun& run, const RecordFiles& files, bool has_files) {
  const std::filesystem::path description = run.description_file(files);
  if (!has_files || read_run_description(description) != run.description) {
    write_run_description(description, run.description);
  }
  for (const offload::Drive& drive : drives_)
    offload::remove_damage_mark(run.files.path_in(drive.directory));
  if (!has_files && run.options.mirror) require_space_for_two(run, files);
  store_.emplace(has_files ? offload::RecordStore::open(run.shape, drives_, run.files)
                           : offload::RecordStore::create(run.shape, drives_, run.files));
}

// A commit can exist without all of its records, so this takes the newest one whose records no rank lacks.
std::optional<offload::CommitPoint> Records::go_to_common_point(const OwnRun& run, RankHistory mine,
                                                                offload::CommitPoint last, Communicator& world) {
  while (true) {
    const auto point = common_point(histories_of_all(world, mine), run.name(), last);
    if (last == run.last()) require_chosen(run, point);
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
