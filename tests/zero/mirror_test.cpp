// Tests of runs whose records are mirrored: one host or drive may be lost at any moment, with the same bits.
#include <random>

#include "offload/preflight.h"
#include "tests/sanitizer.h"
#include "tests/zero/child_process.h"
#include "tests/zero/mirrored_run.h"
#include "tests/zero/progress_pipe.h"
#include "zero/runs/joint_space.h"
#include "zero/runs/records.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// Flips a bit of each record on its way to another rank.
class DamagingCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  void broadcast(View values, std::size_t root) override {
    ForwardingCommunicator::broadcast(values, root);
    if (root == rank() || values.count() <= offload::block_bytes) return;
    values.data()[offload::block_bytes + 10] ^= std::byte{1};
  }
  using ForwardingCommunicator::split;
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return std::unique_ptr<Communicator>(new DamagingCommunicator(part(color, channel)));
  }
};

}  // namespace

TEST_CASE("hosts mirror each other in pairs, and the last three in a ring") {
  const auto mirrored = [](const Hosts& hosts) {
    std::vector<std::size_t> of_ranks;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      const MirrorGroup group = mirror_group_of(rank, hosts);
      of_ranks.push_back(group.mirrored);
      CHECK(std::ranges::count(group.ranks, rank) == 1);
      CHECK(std::ranges::count(group.ranks, group.mirrored) == 1);
      for (const std::size_t member : group.ranks)
        CHECK(mirror_group_of(member, hosts).number == group.number);
    }
    return of_ranks;
  };
  using Ranks = std::vector<std::size_t>;
  CHECK(mirrored({"a", "a", "b", "b"}) == Ranks{2, 3, 0, 1});
  CHECK(mirrored({"a", "b", "b", "a"}) == Ranks{1, 0, 3, 2});
  CHECK(mirrored({"a", "b", "c"}) == Ranks{2, 0, 1});
  CHECK(mirrored({"a", "b", "c", "d", "e"}) == Ranks{1, 0, 4, 2, 3});
  CHECK(mirrored({"a", "a", "a"}) == Ranks{2, 0, 1});  // one host: a drive may be lost
  CHECK_THROWS_WITH(mirror_group_of(0, Hosts{"a"}), Contains("B1005 cannot mirror the run: it has one rank"));
  CHECK_THROWS_WITH(mirror_group_of(0, Hosts{"a", "a", "b"}),
                    Contains("hosts have different numbers of ranks") && Contains("2 ranks on each host"));
}

TEST_CASE("a mirrored run continues with the same bits when a host is lost, on what is left or on a new host") {
  for (const int stage : {3, 1}) {
    const Hosts hosts = stage == 3 ? Hosts{"a", "a", "b", "b"} : Hosts{"a", "b", "c"};
    for (const std::string lost : {"a", "b"}) {
      CAPTURE(stage, lost);
      const TemporaryDirectory directory;
      const TemporaryDirectory undisturbed;
      KeptRun run = mirrored_run(hosts, stage);
      const AllValues values = begun_values(run, directory);
      lose(run, lost);
      Hosts replaced = hosts;
      std::ranges::replace(replaced, lost, std::string("d"));
      Hosts rest = replaced;
      std::erase(rest, replaced.back());
      check_hosts_resume(on(run, replaced), values);
      lose(run, replaced.back());  // all is mirrored again
      check_hosts_resume(on(run, rest, false), values);
      run = on(run, replaced, false);  // the next step is that of a run that lost nothing
      const AllValues after = begun_values(run, directory, 1);
      KeptRun whole = mirrored_run(hosts, stage);
      CHECK((begun_values(whole, undisturbed, steps_before + 1) == after));
    }
  }
}

TEST_CASE("without a mirror, or when both of two hosts are lost, a run is refused") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b", "c", "d"});
  const AllValues values = begun_values(run, directory);
  SECTION("both are lost") {
    lose(run, "a");
    lose(run, "b");
    check_refused(on(run, {"c", "d"}), Contains("no rank finds the records of ranks 0; 1"));
  }
  SECTION("the last start had no mirror") {
    check_hosts_resume(on(run, run.hosts, false), values);
    CHECK(std::filesystem::exists(run.directory / "c" / "mine-rank-2"));
    CHECK_FALSE(std::filesystem::exists(run.directory / "c" / "mine-rank-3"));  // it would be of an older step
    lose(run, "a");
    check_refused(on(run, {"b", "c", "d"}), Contains("no rank finds the records of rank 0"));
  }
}

// What a rank finds in place is what it had; mirrors are made again where they are missing, old or damaged.
TEST_CASE("mirrors are made again where they lack the last commit") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  begun_values(run, directory);
  const std::filesystem::path mirror = records_of(run, "b", 0, "mirror");
  SECTION("because the mirror is missing") { std::filesystem::remove_all(mirror.parent_path()); }
  SECTION("because it is of an older step") {
    const TemporaryDirectory old;
    std::filesystem::copy(mirror, old.path() / "old");
    REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
    std::filesystem::copy(old.path() / "old", mirror, std::filesystem::copy_options::overwrite_existing);
  }
  SECTION("because it is no record file") { std::ofstream(mirror) << std::string(5000, 'x'); }
  SECTION("because ranks changed hosts") { run = on(run, {"b", "a"}); }
  const Ended ended = train(run, 1);
  REQUIRE(ended.failures == std::vector<std::string>(2));
  const std::string lost = run.hosts[0];
  const std::string other = run.hosts[1];
  lose(run, lost);
  check_hosts_resume(on(run, {other}, false), ended.values, ended.began_at[0] + 1);
}

TEST_CASE("a record that is damaged on its way to the mirror is an error") {
  const TemporaryDirectory directory;
  const KeptRun run = mirrored_run({"a", "b"});
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    DamagingCommunicator damaging(world);
    TrainingOptions options = run.options;
    options.drives.directories = {drive_of(run, directory.path(), world.rank())};
    options.drives.run = "mine";
    Training training(run.model, damaging, run.rules, options);
    training.start(initial_parameters());
  });
  CHECK_THAT(failures[0], Contains("B3202 cannot mirror a record: its first region is damaged"));
  CHECK_THAT(failures[1], Contains("B3202 cannot mirror a record: its first region is damaged"));
}

TEST_CASE("a mirror holds the changes between steps, and the notes") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  begun_values(run, directory, 1);
  run.options.drives.run = "mine";  // as train() names it
  const auto with_training = [&](const KeptRun& of, const std::function<void(Training&, std::size_t)>& look) {
    CHECK(failures_of_ranks(of.ranks, [&](Communicator& world) {
            TrainingOptions options = of.options;
            options.drives.directories = {drive_of(of, of.directory, world.rank())};
            options.drives.host = of.hosts[world.rank()];
            Training training(of.model, world, of.rules, options);
            training.start(initial_parameters());
            look(training, world.rank());
          }) == std::vector<std::string>(of.ranks));
  };
  with_training(run, [](Training& training, std::size_t rank) {
    const std::string note = fmt::format("of rank {}", rank);
    training.set_note(std::as_bytes(std::span(note)));
    TrainingState(training).change([](const LocalTile& tile) {
      if (!tile.frozen) std::ranges::fill_n(reinterpret_cast<std::uint16_t*>(tile.memory.parameter), 1, 0x4000);  // 2.0
    });
    bool is_refused = false;  // Catch's macros are for one thread
    try {
      TrainingState(training).change([](const LocalTile&) {}, [] { throw std::runtime_error("refused"); });
    } catch (const std::runtime_error&) {
      is_refused = true;
    }
    if (!is_refused) throw std::logic_error("change() has lost an error");
    TrainingState(training).change([](const LocalTile&) {});
  });
  const Ended changed = train(run, 1);
  lose(run, "b");
  run.options.drives.join_notes = [](const EarlierNotes& notes) {
    CHECK(notes.notes.size() == 2);
    return notes.notes.back();
  };
  KeptRun rest = on(run, {"a"}, false);
  check_hosts_resume(rest, changed.values, 2);
  with_training(rest, [](Training& training, std::size_t) {
    const auto& note = training.note();
    CHECK(std::string(reinterpret_cast<const char*>(note.data()), note.size()) == "of rank 1");
  });
}

TEST_CASE("a run is not mirrored into the directories that it is kept in, and on one host by drives") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a/one", "a/two"});
  const AllValues values = begun_values(run, directory);
  lose(run, "a/one");
  check_hosts_resume(on(run, {"a/two"}, false), values);
  KeptRun shared = mirrored_run({"s", "s"});
  shared.directory = directory.path();
  for (const std::string& failure : train(shared, 1).failures) {
    CHECK_THAT(failure, Contains("B2204 cannot mirror run \"mine\"") && Contains("or leave out mirror"));
  }
  shared.options.drives.mirror = false;
  CHECK(train(shared, 1).failures == std::vector<std::string>(2));
  const Model model = two_layers();
  CHECK_THROWS_WITH(Plan(model, {0, 2}, run.rules, {.state = all_in(Tier::nvme), .drives = {.mirror = true}}),
                    Contains("B1001 cannot mirror state on drives: it belongs to no run"));
}

TEST_CASE("a mirror on the drive of what it mirrors is reported") {
  const auto warnings_of = [](const Hosts& directories, const TemporaryDirectory& directory) {
    std::string lines;
    Log log([&](Level, std::string_view line) { lines += std::string(line) + '\n'; });
    KeptRun run = mirrored_run(directories);
    run.options.drives.log = &log;
    begun_values(run, directory, 1);
    return lines;
  };
  const TemporaryDirectory directory;
  CHECK_THAT(warnings_of({"a", "b"}, directory),
             Contains("the mirrors of 2 of 2 ranks of run \"mine\" lie on the drive that has the records themselves") &&
                 Contains("do not protect against the failure of that drive"));
  const std::filesystem::path other_drive = "/dev/shm";
  const bool is_there = std::filesystem::is_directory(other_drive) &&
                        offload::device_of(other_drive) != offload::device_of(directory.path());
  if (!is_there) return;
  const std::filesystem::path there = other_drive / directory.path().filename();
  CHECK_THAT(warnings_of({"c", there.string()}, directory), !Contains("do not protect"));
  std::filesystem::remove_all(there);
}

TEST_CASE("ranks that share a drive are refused where it has space for each of them, but not for all") {
  const TemporaryDirectory directory;
  const std::vector<std::filesystem::path> directories{directory.path()};
  const std::uint64_t available = std::filesystem::space(directory.path()).available;
  // Each payload has two places.
  const offload::RecordShape shape{.run_id = 1, .tiles = 1, .payload_bytes = available / 10 * 3};
  const auto failures_with = [&](std::size_t ranks, std::size_t ranks_that_write) {
    return failures_of_ranks(ranks, [&](Communicator& world) {
      offload::require_space(shape, directories, 1);
      require_joint_space(world, shape, directories, world.rank() < ranks_that_write ? 1 : 0);
    });
  };
  CHECK(failures_with(1, 1) == std::vector<std::string>(1));
  CHECK(failures_with(3, 1) == std::vector<std::string>(3));
  for (const std::string& failure : failures_with(3, 2)) {
    CHECK_THAT(failure, Contains("B2202 cannot make the state's files: the drive has too little space for all ranks") &&
                            Contains(directory.path().string() + " (ranks 0, 1)") && Contains("for 2 ranks") &&
                            Contains("available"));
  }
}

TEST_CASE("the memory and the drive space of a mirror are in the ledger") {
  const auto ledger_with = [](bool mirror) {
    TrainingOptions options{.state = all_in(Tier::nvme), .drives = {.run = "mine", .mirror = mirror}};
    return Plan(two_layers(), {0, 2}, {optim::AdamW{}}, options).ledger();
  };
  const auto bytes_of = [](const Ledger& ledger, std::string_view owner, Tier tier) {
    std::size_t bytes = 0;
    for (const LedgerEntry& entry : ledger)
      bytes += entry.owner == owner && entry.tier == tier ? entry.bytes : 0;
    return bytes;
  };
  CHECK(bytes_of(ledger_with(true), "mirror", Tier::nvme) == bytes_of(ledger_with(true), "records", Tier::nvme));
  CHECK(bytes_of(ledger_with(true), "mirror", Tier::host) > 0);
  CHECK(bytes_of(ledger_with(false), "mirror", Tier::host) + bytes_of(ledger_with(false), "mirror", Tier::nvme) == 0);
}

// --- Crashes

// Every rank is somewhere else in its step when the process is killed.
TEST_CASE("a mirrored run that is killed loses a host at the same moment, and no step that was committed") {
  const TemporaryDirectory whole;
  KeptRun undisturbed = mirrored_run({"a", "b", "c"});
  undisturbed.directory = whole.path();
  std::vector<AllValues> values{train(undisturbed, 0).values};  // one entry for each step
  std::mt19937 random(11);
  for (std::size_t attempt = 0; attempt < (sanitized ? 3 : 9); ++attempt) {
    const TemporaryDirectory directory;
    KeptRun run = mirrored_run(undisturbed.hosts);
    run.directory = directory.path();
    const std::size_t steps = 1 + random() % 6;
    const std::chrono::microseconds moment(random() % 3000);
    const std::string lost(1, "abc"[attempt % 3]);
    CAPTURE(attempt, steps, moment.count(), lost);
    kill_after(steps, moment, [&](int descriptor) {
      run.progress = descriptor;
      train(run, 1000);
    });
    lose(run, lost);
    Hosts rest = run.hosts;
    std::erase(rest, lost);
    const Ended resumed = train(on(run, rest), 0);
    REQUIRE(resumed.failures == std::vector<std::string>(2));
    REQUIRE(resumed.began_at[0] + 1 >= steps);  // the last step may be under way
    while (values.size() <= resumed.began_at[0])
      values.push_back(train(undisturbed, 1).values);
    CHECK((resumed.values == values[resumed.began_at[0]]));
  }
}

// A host is lost at any moment of a start on other ranks, too: old records go when the new ones are mirrored.
TEST_CASE("a mirrored run that is killed while other ranks take it over can lose a host at the same moment") {
  const TemporaryDirectory original;
  KeptRun begins = mirrored_run({"a", "b"});
  const AllValues values = begun_values(begins, original);
  bool is_killed = true;
  std::size_t kills = 0;
  for (std::size_t agreement = 1; is_killed; agreement += 3 * every(3)) {
    const std::string lost = agreement % 2 == 0 ? "a" : "b";
    CAPTURE(agreement, lost);
    const TemporaryDirectory directory;
    std::filesystem::copy(original.path(), directory.path(), std::filesystem::copy_options::recursive);
    KeptRun run = on(begins, {"a", "a", "b", "b"});
    run.directory = directory.path();
    run.killed_at = agreement;
    is_killed = ChildProcess([&] { train(run, 0); }).ends_killed();
    kills += is_killed ? 1u : 0u;
    run.killed_at = SIZE_MAX;
    lose(run, lost);
    check_hosts_resume(on(run, {lost == "a" ? "b" : "a"}, false), values);
  }
  CHECK(kills >= 10 / every(3));
}
