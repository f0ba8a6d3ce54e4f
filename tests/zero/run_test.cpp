// Tests of runs that are kept under a name: which trainings may resume them, and from which commit.
#include "offload/record_store.h"
#include "tests/zero/kept_run.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

struct Other {
  std::string what;
  std::string run;       // what the run has
  std::string training;  // what this training has instead
  std::function<void(KeptRun& run)> change;
};

const std::vector<Other> others{
    {"another shape with the same tiles", "parameter second [20, 16]", "parameter second [16, 20]",
     [](KeptRun& run) {
       run.model.units[0].tensors[1].shape = {16, 20};
     }},
    {"another frozen layer with the same tiles", "parameter adapter [256]", "frozen parameter adapter [256]",
     [](KeptRun& run) { std::swap(run.model.units[0].tensors[2].frozen, run.model.units[0].tensors[3].frozen); }},
    {"one layer more", "nothing more", "parameter more [1]",
     [](KeptRun& run) {
       run.model.units[0].tensors.push_back({"more", {1}});
     }},
    {"another name", "parameter first [20, 16]", "parameter fi?rst [20, 16]",
     [](KeptRun& run) { run.model.units[0].tensors[0].name = "fi\nrst"; }},
    {"another rule with the same state", "the update rule AdamW", "the update rule Adam",
     [](KeptRun& run) { run.rules = {optim::Adam{.lr = 0.02}}; }},
    {"another rule on fewer ranks", "the update rule AdamW", "the update rule SGD with momentum",
     [](KeptRun& run) {
       run.rules = {optim::SgdMomentum{}};
       run.ranks = 1;
     }},
};

}  // namespace

TEST_CASE("another training cannot resume a run, and the error names the first difference") {
  const TemporaryDirectory directory;
  const KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
  for (const Other& other : others) {
    INFO(other.what);
    KeptRun changed = run;
    other.change(changed);
    check_refused(changed, Contains("B1009 cannot resume run \"mine\": it has " + other.run) &&
                               Contains("but this training has " + other.training));
  }
  const Ended resumed = train(run, 1);
  CHECK(resumed.failures == std::vector<std::string>(2));
  CHECK(resumed.began_at == std::vector<std::uint64_t>{2, 2});
}

TEST_CASE("a run is resumed with other rates, groups, tiers and schedules") {
  const TemporaryDirectory directory;
  KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
  run.rules = {optim::AdamW{.lr = 0.001}, optim::AdamW{.lr = 0.1, .weight_decay = 0.0}};
  run.model.units[0].tensors[1].group = 1;
  run.options.parameters = all_in(Tier::nvme);
  run.options.schedule.update_in_backward = true;
  const Ended resumed = train(run, 1);
  CHECK(resumed.failures == std::vector<std::string>(2));
  CHECK(resumed.began_at == std::vector<std::uint64_t>{2, 2});
}

TEST_CASE("ranks whose directories do not belong together are refused") {
  const TemporaryDirectory directories[2];
  const KeptRun run{.directory = directories[0].path()};
  const KeptRun other{.directory = directories[1].path()};
  for (const KeptRun& each : {run, other})
    REQUIRE(train(each, 2).failures == std::vector<std::string>(2));
  SECTION("one directory is of another run with the same name, training and step") {
    replace(directory_of(run, 1), directory_of(other, 1));
    check_refused(run, Contains("B1009") && Contains("belong to different runs") && Contains("rank 1 has run"));
  }
  SECTION("the directories are swapped") {
    for (const std::size_t rank : {0u, 1u})
      replace(directory_of(run, rank), directory_of(other, 1 - rank));
    check_refused(run, Contains("B1009") && Contains("directory of rank 1") && Contains("mine-rank-0"));
  }
  SECTION("one directory is missing") {
    std::filesystem::remove_all(directory_of(run, 1));
    const Ended ended = train(run, 1);
    for (const std::string& failure : ended.failures)
      CHECK_THAT(failure, Contains("B1009") && Contains("no rank finds the records of rank 1") &&
                              Contains("rank 0 has step 2 (commit 3 of incarnation 1)"));
  }
}

TEST_CASE("a run on two drives refuses swapped drives") {
  const TemporaryDirectory first;
  const TemporaryDirectory second;
  KeptRun run{.directory = first.path(), .second = second.path()};
  REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
  std::swap(run.directory, run.second);
  check_refused(run, Contains("B1009") && Contains("file 2 of 2, not file 1 of 2") && Contains("swapped"));
  std::swap(run.directory, run.second);
  CHECK(train(run, 1).began_at == std::vector<std::uint64_t>{2, 2});
}

// Rank 0 commits a step, and rank 1 does not; after a restart with other data it is the other way round.
TEST_CASE("two histories of a run do not mix, even after several restarts") {
  const TemporaryDirectory directory;
  const TemporaryDirectory elsewhere;
  KeptRun run{.directory = directory.path()};
  const auto save = [&](std::size_t rank, std::string_view as) {
    replace(elsewhere.path() / as, directory_of(run, rank));
  };
  const auto restore = [&](std::size_t rank, std::string_view as) {
    replace(directory_of(run, rank), elsewhere.path() / as);
  };
  REQUIRE(train(run, 5).failures == std::vector<std::string>(2));
  save(0, "5 on rank 0"), save(1, "5 on rank 1");
  REQUIRE(train(run, 1).began_at == std::vector<std::uint64_t>{5, 5});
  save(0, "6 on rank 0");
  restore(1, "5 on rank 1");
  run.data = 1;
  REQUIRE(train(run, 1).began_at == std::vector<std::uint64_t>{5, 5});
  restore(0, "6 on rank 0");
  run.data = 2;
  const Ended resumed = train(run, 1);
  CHECK(resumed.failures == std::vector<std::string>(2));
  CHECK(resumed.began_at == std::vector<std::uint64_t>{5, 5});

  restore(0, "5 on rank 0"), restore(1, "5 on rank 1");
  const Ended expected = train(run, 1);
  CHECK((resumed.parameters == expected.parameters));
}

TEST_CASE("ranks without a common commit are refused, and the error lists the commits of each") {
  const TemporaryDirectory directory;
  const TemporaryDirectory elsewhere;
  const KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
  replace(elsewhere.path() / "rank 1", directory_of(run, 1));
  REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
  replace(directory_of(run, 1), elsewhere.path() / "rank 1");
  check_refused(run,
                Contains("B1009") && Contains("no commit in common") &&
                    Contains("rank 0 has step 4 (commit 5 of incarnation 2) and step 3 (commit 4 of incarnation 2); "
                             "rank 1 has step 2 (commit 3 of incarnation 1) and step 1 (commit 2 of incarnation 1)"));
}

// The generation that the file was made with is the first, and the initial values are the second.
TEST_CASE("a commit damaged on one rank is skipped by all, and without a common one damage is reported") {
  const TemporaryDirectory directory;
  const KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 3).failures == std::vector<std::string>(2));
  const auto damage = [&](std::size_t rank, std::uint64_t step) {
    const auto queue = offload::open_queue();
    const offload::Drive drives[] = {{directory_of(run, rank), queue.get()}};
    const offload::RecordPlaces places(offload::RecordStore::look(drives)->shape, 1);
    std::fstream file(directory_of(run, rank) / "state.records", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(places.offset_of(1, step + 2) + 100));
    file.put('!');
  };
  damage(0, 3);
  CHECK(train(run, 0).began_at == std::vector<std::uint64_t>{2, 2});
  damage(1, 2);
  check_refused(run, Contains("B3202") && Contains("no commit in common") &&
                         Contains("rank 0 has step 2 (commit 3 of incarnation 1), and records that are damaged"));
}

TEST_CASE("a run keeps its tiles where the caller asks for none") {
  const TemporaryDirectory directory;
  KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 2).failures == std::vector<std::string>(2));
  run.options.tile_elements = 0;
  const Ended resumed = train(run, 1);
  CHECK(resumed.failures == std::vector<std::string>(2));
  CHECK(resumed.began_at == std::vector<std::uint64_t>{2, 2});
}

TEST_CASE("a run of an older format is reported as old on all ranks, not as damaged") {
  const TemporaryDirectory directory;
  const KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 1).failures == std::vector<std::string>(2));
  std::fstream file(directory_of(run, 1) / "state.records", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(16);
  file.put(1);
  file.close();
  check_refused(run, Contains("B1010") && Contains("rank 1: ") && Contains("available: format 1"));
}

TEST_CASE("a run without its description resumes, and the description is written again") {
  const TemporaryDirectory directory;
  const KeptRun run{.directory = directory.path()};
  REQUIRE(train(run, 1).failures == std::vector<std::string>(2));
  const auto described = contents(directory_of(run, 0)).at(directory_of(run, 0) / "state.description");
  for (const std::size_t rank : {0u, 1u})
    std::filesystem::remove(directory_of(run, rank) / "state.description");
  KeptRun other = run;
  other.ranks = 1;
  check_refused(other, Contains("B1009 cannot resume run \"mine\": another training began it") &&
                           Contains("state.description is missing or damaged") && Contains("on as many ranks"));
  CHECK(train(run, 1).began_at == std::vector<std::uint64_t>{1, 1});
  CHECK(contents(directory_of(run, 0)).at(directory_of(run, 0) / "state.description") == described);
}

TEST_CASE("a start logs which run it begins or resumes, and after which step") {
  const TemporaryDirectory directory;
  std::mutex mutex;
  std::string log_text;
  Log log([&](Level, std::string_view line) {
    const std::lock_guard lock(mutex);
    log_text += std::string(line) + "\n";
  });
  KeptRun run{.directory = directory.path()};
  run.options.drives.log = &log;
  REQUIRE(train(run, 3).failures == std::vector<std::string>(2));
  CHECK_THAT(log_text, Contains("begins run \"mine\" (0x") && Contains("incarnation 1\n"));
  log_text.clear();
  REQUIRE(train(run, 0).failures == std::vector<std::string>(2));
  CHECK_THAT(log_text, Contains("resumes run \"mine\" (0x") && Contains("after step 3: commit 4 of incarnation 1") &&
                           Contains("this is incarnation 2\n"));
}

TEST_CASE("a run that begins where only traces of an earlier one are left warns of them") {
  const TemporaryDirectory directory;
  std::mutex mutex;
  std::string log_text;
  Log log([&](Level level, std::string_view line) {
    const std::lock_guard lock(mutex);
    if (level == Level::warning) log_text += std::string(line) + "\n";
  });
  KeptRun run{.directory = directory.path()};
  run.options.drives.log = &log;
  REQUIRE(train(run, 3).failures == std::vector<std::string>(2));
  CHECK(log_text.empty());
  for (const std::size_t rank : {0u, 1u})
    std::filesystem::remove(directory_of(run, rank) / "state.records");
  SECTION("a description") {
    CHECK(train(run, 0).began_at == std::vector<std::uint64_t>{0, 0});
    CHECK_THAT(log_text, Contains("run \"mine\" begins at step 0, but it has begun before: " +
                                  directory_of(run, 1).string() + " has a description without records"));
  }
  SECTION("the note of its newest checkpoint") {
    std::ofstream(directory_of(run, 0) / "newest-checkpoint") << "2 /a/checkpoint\n";
    CHECK(train(run, 0).began_at == std::vector<std::uint64_t>{0, 0});
    CHECK_THAT(log_text, Contains("has no records, and the note that /a/checkpoint has a checkpoint of step 2"));
  }
}

// Rank 1 ends before the change: it may not even have committed the step before.
TEST_CASE("state of a run is not changed before all ranks take part") {
  const TemporaryDirectory directory;
  KeptRun run{.directory = directory.path()};
  run.options.drives = {.directories = {run.directory}, .run = "mine"};
  std::size_t changed = 0;
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Training training(run.model, world, run.rules, run.options);
    training.start(initial_parameters());
    SyntheticTrainer trainer(run.model, world.rank());
    trainer.run(training, 0);
    training.step();
    training.finish();
    world.barrier();
    if (world.rank() == 1) return world.abort("it ends here");
    TrainingState(training).change([&](const LocalTile&) { ++changed; });
  });
  CHECK_THAT(failures[0], Contains("B3301"));
  CHECK(changed == 0);
}

TEST_CASE("a change of state is committed as the step that is set in the ranks' agreement") {
  const TemporaryDirectory directory;
  KeptRun run{.directory = directory.path()};
  run.options.drives = {.directories = {run.directory}, .run = "mine"};
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Training training(run.model, world, run.rules, run.options);
    training.start(initial_parameters());
    TrainingState(training).change([](const LocalTile&) {}, [&] { TrainingState(training).set_steps(3); });
  });
  CHECK(failures == std::vector<std::string>(2));
  CHECK(train(run, 0).began_at == std::vector<std::uint64_t>(2, 3));
}

// Rank 1 fails in one change and continues. If rank 0 committed it, rank 1's commits would count one less from then on.
TEST_CASE("state of a run is changed on all ranks or on none") {
  const TemporaryDirectory directory;
  KeptRun run{.directory = directory.path()};
  run.options.drives = {.directories = {run.directory}, .run = "mine"};
  const auto nothing = [](const LocalTile&) {};
  std::vector<std::vector<std::string>> refused(2);
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Training training(run.model, world, run.rules, run.options);
    training.start(initial_parameters());
    const auto fail_on_1 = [&] {
      if (world.rank() == 1) throw std::runtime_error("rank 1 has nothing to put there");
    };
    const auto change = [&](const TileVisitor& look, const std::function<void()>& agree) {
      try {
        TrainingState(training).change(look, agree);
      } catch (const std::exception& error) {
        refused[world.rank()].emplace_back(error.what());
      }
    };
    change([&](const LocalTile&) { fail_on_1(); }, [] {});
    change(nothing, fail_on_1);
    TrainingState(training).change(nothing);
    SyntheticTrainer trainer(run.model, world.rank());
    trainer.run(training, 0);
    training.step();
  });
  CHECK(failures == std::vector<std::string>(2));
  for (const std::string& failure : refused[0])
    CHECK_THAT(failure, Contains("B3301") && Contains("rank 1 cannot change the state"));
  CHECK(refused[0].size() == 2);
  CHECK(refused[1] == std::vector<std::string>(2, "rank 1 has nothing to put there"));
  CHECK(train(run, 1).began_at == std::vector<std::uint64_t>(2, 1));
}
