#include "zero/runs/records.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "offload/preflight.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/runs/joint_space.h"

namespace ballast {
namespace {

using RanksOfHost = std::vector<std::size_t>;

// Returns the ranks of each host, in the order of the hosts' first ranks.
std::vector<RanksOfHost> by_host(std::span<const std::string> hosts) {
  std::vector<RanksOfHost> ranks;
  std::vector<std::string> names;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto host = static_cast<std::size_t>(std::ranges::find(names, hosts[rank]) - names.begin());
    if (host == names.size()) {
      names.push_back(hosts[rank]);
      ranks.emplace_back();
    }
    ranks[host].push_back(rank);
  }
  return ranks;
}

std::vector<RanksOfHost> each_alone(std::size_t ranks) {
  std::vector<RanksOfHost> hosts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    hosts.push_back({rank});
  return hosts;
}

void require_mirrors(const std::vector<RanksOfHost>& hosts) {
  require(hosts.size() > 1, Code::unsupported, [] {
    return Problem{.what = "cannot mirror the run: it has one rank",
                   .needed = "a second rank, with directories of its own",
                   .remedy = "Leave out mirror, or train on several ranks."};
  });
  const auto other =
      std::ranges::find_if(hosts, [&](const RanksOfHost& ranks) { return ranks.size() != hosts.front().size(); });
  require(other == hosts.end(), Code::unsupported, [&] {
    return Problem{.what = "cannot mirror the run: hosts have different numbers of ranks",
                   .where = fmt::format("the hosts of rank {} and of rank {}", hosts.front().front(), other->front()),
                   .needed = fmt::format("{} ranks on each host", hosts.front().size()),
                   .available = fmt::format("{} ranks", other->size()),
                   .remedy = "Start as many ranks on each host, or leave out mirror."};
  });
}

// Hosts 0 and 1 are the first group, hosts 2 and 3 the second; the last three hosts are one where hosts are odd in number.
std::size_t group_of(std::size_t host, std::size_t hosts) { return std::min(host / 2, hosts / 2 - 1); }

// Containers of a machine are one host: they lose their drives together.
std::string host_of(const RecordOptions& options) { return options.host.empty() ? booted_machine() : options.host; }

// None where there are no files, or none that can continue: they are a copy, and are made again.
std::optional<offload::RecordStore> opened(const OwnRun& run, const offload::RecordShape& shape,
                                           const RecordFiles& kept) {
  if (run.missing_file(kept) || run.are_marked_damaged(kept)) return {};
  const auto open = [&] {
    return std::optional(offload::RecordStore::open(shape, run.drives(kept), run.files_of(kept)));
  };
  return run.unless_damaged(open, true);
}

// The same; removes what is there, so that it is made again.
std::optional<offload::RecordStore> opened_or_removed(const OwnRun& run, const offload::RecordShape& shape,
                                                      const RecordFiles& kept) {
  offload::write_text(run.description_file(kept), run.description);
  if (auto store = opened(run, shape, kept)) return store;
  for (const std::filesystem::path& drive : run.options.directories)
    remove_records(drive, run.name(), kept);
  offload::write_text(run.description_file(kept), run.description);
  return {};
}

// The machine, and the devices of the directories.
std::string location_of(const RecordOptions& options) {
  std::string text = booted_machine();
  for (const std::filesystem::path& directory : options.directories)
    text += fmt::format("\n{}", offload::device_of(directory));
  return text;
}

bool share_a_drive(const std::string& one, const std::string& other) {
  const std::vector<std::string> drives = lines_of(one);
  const std::vector<std::string> others = lines_of(other);
  return drives.front() != unknown_machine && drives.front() == others.front() &&
         std::any_of(drives.begin() + 1, drives.end(), [&](const auto& device) {
           return std::find(others.begin() + 1, others.end(), device) != others.end();
         });
}

// A mirror that is lost together with what it mirrors. One rank says it for all.
void warn_of_shared_drives(const OwnRun& run, std::size_t mirrored, Communicator& world) {
  std::string mine;
  on_all_ranks(world, [&] { mine = location_of(run.options); });
  const std::vector<std::string> all = texts_of_all(world, mine);
  std::vector<std::int64_t> is_shared(world.size());
  is_shared[mirrored] = share_a_drive(mine, all[mirrored]) ? 1 : 0;
  world.all_reduce(is_shared);
  const auto first = std::ranges::find(is_shared, 1);
  if (first == is_shared.end() || world.rank() > 0) return;
  run.warn(fmt::format(
      "the mirrors of {} of {} ranks of run \"{}\" lie on the drive that has the records themselves, such as those of rank "
      "{}: they do not protect against the failure of that drive. Give ranks that mirror each other directories on "
      "different drives.",
      std::ranges::count(is_shared, 1), world.size(), run.name(), first - is_shared.begin()));
}

}  // namespace

MirrorGroup mirror_group_of(std::size_t rank, std::span<const std::string> names) {
  std::vector<RanksOfHost> hosts = by_host(names);
  const bool is_one_host = hosts.size() == 1;
  if (is_one_host) hosts = each_alone(names.size());
  require_mirrors(hosts);
  const auto mirrored_on = [&](std::size_t host) -> const RanksOfHost& {
    const bool is_first = host == 0 || group_of(host - 1, hosts.size()) != group_of(host, hosts.size());
    if (!is_first) return hosts[host - 1];
    std::size_t last = host;
    while (last + 1 < hosts.size() && group_of(last + 1, hosts.size()) == group_of(host, hosts.size()))
      ++last;
    return hosts[last];
  };
  const auto own = static_cast<std::size_t>(
      std::ranges::find_if(hosts, [&](const RanksOfHost& ranks) { return std::ranges::count(ranks, rank) > 0; }) -
      hosts.begin());
  const auto place = static_cast<std::size_t>(std::ranges::find(hosts[own], rank) - hosts[own].begin());
  const std::size_t group = group_of(own, hosts.size());
  MirrorGroup found{
      .number = group * hosts[own].size() + place, .mirrored = mirrored_on(own)[place], .on_host = mirrored_on(own)};
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    if (group_of(host, hosts.size()) == group) found.ranks.push_back(hosts[host][place]);
  }
  std::ranges::sort(found.ranks);
  if (is_one_host) {
    found.on_host.resize(names.size());
    std::iota(found.on_host.begin(), found.on_host.end(), std::size_t{0});
  }
  return found;
}

RunMirror::RunMirror(const OwnRun& run, const RecordFiles& own, Communicator& world) {
  const MirrorGroup group = mirror_group_of(world.rank(), texts_of_all(world, host_of(run.options)));
  const RecordFiles kept{group.mirrored, own.made_in, true};
  on_host_ = group.on_host;
  on_all_ranks(world, [&] { lock(run, kept); });
  warn_of_shared_drives(run, kept.rank, world);
  auto mirror_each_other = world.split(group.number);
  offload::RecordShape shape = run.shape;
  shape.rank = static_cast<std::uint32_t>(kept.rank);
  const auto place = std::ranges::find(group.ranks, kept.rank) - group.ranks.begin();
  std::optional<offload::RecordStore> store;
  on_all_ranks(world, [&] {
    if (auto found = opened_or_removed(run, shape, kept)) store.emplace(std::move(*found));
  });
  require_joint_space(world, shape, run.options.directories, store ? 0 : 1);
  on_all_ranks(world, [&] {
    if (!store) store.emplace(offload::RecordStore::create(shape, run.drives(kept), run.files_of(kept)));
    files_.emplace(MirrorFiles{.group = std::move(mirror_each_other),
                               .mirrored = static_cast<std::size_t>(place),
                               .store = std::move(*store)});
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

// A rank whose drive fails would otherwise leave the others of its group waiting.
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
  world.barrier();  // a rank that continues removes old records, which other ranks may still need
}

}  // namespace ballast
