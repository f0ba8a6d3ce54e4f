#include "zero/runs/mirror.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/runtime/system_files.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/comm/texts.h"
#include "zero/runs/mirror_group.h"

namespace ballast {
namespace {

// Containers of a machine are one host: they lose their drives together.
std::string host_of(const RecordOptions& options) {
  return options.host.empty() ? read_text("/proc/sys/kernel/random/boot_id").value_or("?") : options.host;
}

// None where there are no files, or none that can continue: they are a copy, and are made again.
std::optional<offload::RecordStore> opened(const OwnRun& run, const offload::RecordShape& shape,
                                           const RecordFiles& kept) {
  const auto drives = run.drives(kept);
  if (missing_file(drives, run.files_of(kept)) || are_marked_damaged(drives, run.files_of(kept))) return {};
  try {
    return offload::RecordStore::open(shape, drives, run.files_of(kept));
  } catch (const Error& error) {
    if (error.code() != Code::bad_record && error.code() != Code::run_mismatch) throw;
    if (run.options.log != nullptr) run.options.log->warning(error.what());
    return {};
  }
}

offload::RecordStore opened_or_created(const OwnRun& run, const offload::RecordShape& shape, const RecordFiles& kept) {
  write_run_description(run.description_file(kept), run.description);
  if (auto store = opened(run, shape, kept)) return std::move(*store);
  for (const std::filesystem::path& drive : run.options.directories)
    remove_records(drive, run.name(), kept);
  write_run_description(run.description_file(kept), run.description);
  return offload::RecordStore::create(shape, run.drives(kept), run.files_of(kept));
}

}  // namespace

RunMirror::RunMirror(const OwnRun& run, const RecordFiles& own, Communicator& world) {
  const MirrorGroup group = mirror_group_of(world.rank(), texts_of_all(world, host_of(run.options)));
  const RecordFiles kept{group.mirrored, own.made_in, true};
  on_host_ = group.on_host;
  on_all_ranks(world, [&] { lock(run, kept); });
  auto mirror_each_other = world.split(group.number);
  offload::RecordShape shape = run.shape;
  shape.rank = static_cast<std::uint32_t>(kept.rank);
  const auto place = std::ranges::find(group.ranks, kept.rank) - group.ranks.begin();
  on_all_ranks(world, [&] {
    files_.emplace(MirrorFiles{.group = std::move(mirror_each_other),
                               .mirrored = static_cast<std::size_t>(place),
                               .store = opened_or_created(run, shape, kept)});
  });
}

// The other rank has locked its own directories by now.
void RunMirror::lock(const OwnRun& run, const RecordFiles& kept) {
  for (const std::filesystem::path& drive : run.options.directories) {
    const std::filesystem::path directory = kept.directory(drive, run.name());
    try {
      directories_.emplace_back(directory);
    } catch (const Error& error) {
      if (error.code() != Code::directory_in_use) throw;
      fail(
          Code::directory_in_use,
          {.what = fmt::format("cannot mirror run \"{}\": rank {} itself uses the directory where its mirror would be, "
                               "or another job does",
                               run.name(), kept.rank),
           .where = directory.string(),
           .needed = "directories of their own for two ranks that mirror each other, which are not lost together",
           .remedy = "Give each host a local drive (on one host: each rank a drive of its own), or leave out mirror."});
    }
  }
}

// Without this, a rank whose drive fails would leave the others of its group waiting.
void RunMirror::catch_up(const offload::RecordStore& own, const std::optional<offload::CommitPoint>& point,
                         offload::CommitPoint next, Communicator& world) {
  try {
    const std::size_t bytes = RecordMirror::records_in_memory * own.record_bytes();
    const HostPages memory = map_host_pages(bytes, "records that are mirrored");
    RecordMirror(*files_, own, {memory.get(), bytes}).catch_up(point, next);
  } catch (const std::exception& error) {
    world.abort(error.what());
    throw;
  }
}

}  // namespace ballast
