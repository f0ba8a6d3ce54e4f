// Runs whose ranks mirror each other, on hosts that are directories, and damage to their records.
#pragma once

#include <fstream>

#include "offload/record_store.h"
#include "tests/zero/kept_run.h"

namespace ballast::testing {

using Hosts = std::vector<std::string>;  // a name for each rank; its first letter is the host, all of it the directory

inline KeptRun mirrored_run(const Hosts& hosts, int stage = 3) {
  KeptRun run{.ranks = hosts.size(),
              .hosts = hosts,
              .shows_values = true,
              .options = {.stage = stage, .state = all_in(Tier::nvme), .tile_elements = 128}};
  run.options.drives.mirror = true;
  return run;
}

inline KeptRun on(KeptRun run, const Hosts& hosts, bool mirror = true) {
  run.ranks = hosts.size();
  run.hosts = hosts;
  run.options.drives.mirror = mirror;
  return run;
}

inline void check_hosts_resume(const KeptRun& run, const AllValues& values, std::size_t step = steps_before) {
  const Ended resumed = train(run, 0);
  CHECK(resumed.failures == std::vector<std::string>(run.ranks));
  CHECK(resumed.began_at == std::vector<std::uint64_t>(run.ranks, step));
  CHECK((resumed.values == values));
}

// Trains some steps of a new run, and returns its values.
inline AllValues begun_values(KeptRun& run, const TemporaryDirectory& directory, std::size_t steps = steps_before) {
  run.directory = directory.path();
  const Ended ended = train(run, steps);
  REQUIRE(ended.failures == std::vector<std::string>(run.ranks));
  return ended.values;
}

inline void lose(const KeptRun& run, std::string_view host) { std::filesystem::remove_all(run.directory / host); }

inline std::filesystem::path records_of(const KeptRun& run, std::string_view host, std::size_t rank,
                                        std::string_view name) {
  return run.directory / host / fmt::format("mine-rank-{}", rank) / fmt::format("{}.records", name);
}

// Flips a bit of a tile's record, in both generations.
inline void damage(const std::filesystem::path& file, std::uint64_t byte = offload::block_bytes + 100) {
  const auto queue = offload::open_queue();
  const offload::Drive drives[] = {{file.parent_path(), queue.get()}};
  const auto found = offload::RecordStore::look(drives, {.name = file.stem().string()});
  const offload::RecordPlaces places(found->shape, 1);
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  for (const std::uint64_t generation : {0u, 1u}) {
    const auto at = static_cast<std::streamoff>(places.offset_of(1, generation) + byte);
    bytes.seekg(at);
    const int before = bytes.get();
    bytes.seekp(at);
    bytes.put(static_cast<char>(before ^ 1));
  }
}

}  // namespace ballast::testing
