#include "zero/runs/records.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <iterator>

#include "offload/file.h"
#include "offload/preflight.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/runs/adopt_run.h"
#include "zero/runs/joint_space.h"

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

// All ranks call it together, and get what rank 0 draws.
std::uint64_t draw_run_id(Communicator& world) {
  std::int64_t id = world.rank() == 0 ? std::bit_cast<std::int64_t>(random_id()) : 0;
  world.all_reduce({&id, 1});
  return std::bit_cast<std::uint64_t>(id);
}

void remove_damage_marks(const OwnRun& run, const RecordFiles& files) {
  for (const offload::Drive& drive : run.drives(files))
    offload::remove_damage_mark(run.files_of(files).path_in(drive.directory));
}

// Records that were removed leave traces where their directory stays.
void warn_of_traces(const OwnRun& run) {
  const std::filesystem::path directory = run.first_directory({.rank = run.rank()});
  const KnownCheckpoint checkpoint = newest_checkpoint_of(directory);
  const auto is_own = [&](std::size_t rank) { return rank == run.rank(); };
  const bool is_described = !leftovers_on(run.options.directories.front(), run.name(), is_own).empty();
  if (checkpoint.path.empty() && !is_described) return;
  run.warn(fmt::format(
      "run \"{}\" begins at step 0, but it has begun before: {} has {}. Its records were removed, or a start "
      "was stopped before it had made them",
      run.name(), directory.string(),
      checkpoint.path.empty() ? "a description without records"
                              : fmt::format("no records, and the note that {} has a checkpoint of step {}",
                                            checkpoint.path, checkpoint.step)));
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

void require_run_on_drives(const std::string& run, const Spread& state) {
  require(state.nvme >= 1.0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot keep run \"{}\": its state is not all on drives", run),
                   .needed = "all_in(Tier::nvme), in Python offload={\"state\": \"nvme:DIRECTORY\"}",
                   .available = fmt::format("{:g} of it on drives", state.nvme),
                   .remedy = "Place all state on drives, or give the training no name of a run."};
  });
}

void require_directories(const RecordOptions& options) {
  require(!options.directories.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot keep state on drives: there are no directories",
                   .needed = "TrainingOptions::drives.directories, the directories to keep it in"};
  });
  for (const std::filesystem::path& directory : options.directories) {
    std::error_code failed;
    require(std::filesystem::is_directory(directory, failed), Code::bad_argument, [&] {
      return Problem{.what = "cannot keep state on drives: there is no such directory",
                     .where = directory.string(),
                     .needed = "a directory that exists, so that a missing drive is not taken for an empty one"};
    });
  }
}

std::size_t tile_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  std::vector<std::int64_t> tiles(world.size());
  on_all_ranks(world, [&] {
    require_directories(options);
    const std::filesystem::path& drive = options.directories.front();
    const auto is_own = [&](std::size_t rank) { return rank == world.rank(); };
    for (const RecordFiles& files : record_files_on(drive, options.run, is_own)) {
      const auto state =
          RecordedState::of(read_run_manifest(files.directory(drive, options.run) / files.description_name()));
      if (state) tiles[world.rank()] = std::max(tiles[world.rank()], static_cast<std::int64_t>(state->largest_tile()));
    }
  });
  world.all_reduce(tiles);
  return static_cast<std::size_t>(std::ranges::max(tiles));
}

Records::Records(const CompiledPlan& plan, Communicator& world, const RecordOptions& options) {
  on_all_ranks(world, [&] { require_directories(options); });
  const std::size_t records = 2 * plan.tiles_on_drive() + plan.frozen_on_drive();
  if (world.size() > 1 && options.turn_patience.count() > 0) {
    const dev_t drive = offload::device_of(options.directories.front());
    peers_ = std::make_unique<DrivePeers>(world, drive, records, options.turn_patience);
  }
  const bool keeps_run = !options.run.empty() && plan.tiles_on_drive() > 0;
  require(!keeps_run || plan.blocks().full_records(), Code::internal,
          [] { return Problem{.what = "cannot keep a run: its records lack the parameters"}; });
  const offload::StoreOptions files{.file = {.allow_network = options.allow_network}, .log = options.log};
  keeps_run ? add_drives_of_run(world, options) : add_scratch_drives(world, options);
  if (plan.frozen_on_drive() > 0) {
    make_scratch(plan.blocks().frozen_shape(plan.frozen_on_drive()), world, files, frozen_);
  }
  if (plan.tiles_on_drive() == 0) return;
  const offload::RecordShape shape = plan.blocks().shape(plan.tiles_on_drive());
  if (!keeps_run) {
    make_scratch(shape, world, files, store_);
    return;
  }
  OwnRun run{{options}, plan, describe(plan), shape};
  run.shape.rank = static_cast<std::uint32_t>(world.rank());
  run.shape.content_digest = digest_of(run.description);
  open_run(std::move(run), world);
}

void Records::add_scratch_drives(Communicator& world, const RecordOptions& options) {
  on_all_ranks(world, [&] {
    for (const std::filesystem::path& directory : options.directories) {
      offload::remove_stale_scratch(directory);
      add_drive(directory, options);
    }
  });
}

void Records::add_drives_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  on_all_ranks(world, [&] {
    for (const std::filesystem::path& directory : options.directories) {
      const std::filesystem::path own = RecordFiles{.rank = world.rank()}.directory(directory, options.run);
      kept_.emplace_back(own);
      add_drive(own, options);
    }
  });
}

void Records::make_scratch(offload::RecordShape shape, Communicator& world, const offload::StoreOptions& files,
                           std::optional<offload::RecordStore>& into) {
  shape.rank = static_cast<std::uint32_t>(world.rank());
  shape.places = 1;
  std::vector<std::filesystem::path> directories;
  std::ranges::transform(drives_, std::back_inserter(directories), &offload::Drive::directory);
  require_joint_space(world, shape, directories, 1);
  on_all_ranks(world, [&] { into.emplace(offload::RecordStore::scratch(shape, drives_, files)); });
}

void Records::add_drive(const std::filesystem::path& directory, const RecordOptions& options) {
  queues_.push_back(offload::open_queue({.depth = options.depth, .log = options.log}));
  drives_.push_back({directory, queues_.back().get()});
}

void Records::open_run(OwnRun run, Communicator& world) {
  const RecordOptions& options = run.options;
  run.queues = queues();
  const SettledRun settled = settle_run(run, world);
  const RecordFiles& files = settled.files;
  lost_ = settled.lost;
  run.shape.run_id = settled.run_id != 0 ? settled.run_id : draw_run_id(world);
  const std::size_t stores = options.mirror ? 2 : 1;  // its own records, and those that it mirrors
  require_joint_space(world, run.shape, options.directories, settled.are_there ? 0 : stores);
  // There was no other copy of files that are marked as damaged: if they are, a read will fail and mark them again. But where
  // the run goes back to an earlier commit, the damaged one stays until a step overwrites it.
  on_all_ranks(world, [&] {
    if (!settled.are_there && !lost_) warn_of_traces(run);
    if (!settled.goes_back) remove_damage_marks(run, files);
    open_or_create(run, settled);
  });
  found_ = settled.run.has_value();
  const auto point = found_ ? std::optional(settled.run->point) : std::nullopt;
  const offload::CommitPoint next{settled.incarnation, found_ ? point->number : 0};
  if (options.mirror) {
    mirror_.emplace(run, files, world);
    mirror_->catch_up(*store_, point, next, world);
  }
  settled.remove_others(mirror_ ? mirror_->ranks_on_host() : std::vector<std::size_t>{});
  store_->count_from(next);
  if (options.log == nullptr || world.rank() > 0) return;
  options.log->info(
      found_
          ? fmt::format("resumes run \"{}\" ({:#x}) after step {}: commit {} of incarnation {}; this is "
                        "incarnation {}",
                        run.name(), run.shape.run_id, store_->step(), point->number, point->incarnation,
                        next.incarnation)
          : fmt::format("begins run \"{}\" ({:#x}), incarnation {}", run.name(), run.shape.run_id, next.incarnation));
}

// Writes the description first: files without one would be refused without a reason.
void Records::open_or_create(const OwnRun& run, const SettledRun& settled) {
  const RecordFiles& files = settled.files;
  const std::filesystem::path description = run.description_file(files);
  if (!settled.are_there || read_run_manifest(description) != run.description)
    offload::write_text(description, run.description);
  store_.emplace(settled.are_there ? offload::RecordStore::open(run.shape, run.drives(files), run.files_of(files))
                                   : offload::RecordStore::create(run.shape, run.drives(files), run.files_of(files)));
  const bool is_here = !settled.run || store_->go_to(settled.run->point);
  require(is_here, Code::bad_record, [&] {
    return Problem{.what = fmt::format("cannot {}: its records have changed meanwhile", run.goal.what),
                   .where = run.first_directory(files).string()};
  });
}

std::vector<offload::IoQueue*> Records::queues() const {
  std::vector<offload::IoQueue*> queues;
  for (const auto& queue : queues_)
    queues.push_back(queue.get());
  return queues;
}

}  // namespace ballast
