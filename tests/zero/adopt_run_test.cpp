// Tests of runs that other ranks continue, another stage, format or tile: with the same bits, and after a crash at any moment.
#include "offload/record_store.h"
#include "tests/limited_child.h"
#include "tests/sanitizer.h"
#include "tests/zero/child_process.h"
#include "tests/zero/moved_run.h"
#include "zero/runs/files.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// The same parameters in one unit for each format, in another order.
Model in_two_units() {
  return {{{.name = "half",
            .tensors = {{"b", {3}}, {"w", {700}}, {"weight", {30, 29}}, {"fixed", {450}, 0, true}, {"empty", {0}}}},
           {.name = "single", .dtype = DType::fp32, .tensors = {{"gain", {50}}}}}};
}

// What a training of this format keeps of values.
AllValues rounded_to(const AllValues& values, StateFormat format, const Model& model) {
  AllValues rounded = values;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      const auto found = rounded.find(tensor.name);
      if (found == rounded.end()) continue;
      const std::size_t count = tensor.elements();
      const ChunkKind kind{unit.dtype, unit.dtype == DType::bf16 ? format : StateFormat::fp32, true, true};
      std::vector<std::byte> chunk(kind.bytes(count));
      kernels::copy_state(found->second.memory(), kind.tile(chunk.data(), count));
      kernels::copy_state(kind.tile(chunk.data(), count), found->second.memory());
    }
  }
  return rounded;
}

struct Change {
  std::string what;
  KeptRun before;
  KeptRun after;
};

std::vector<Change> changes() {
  std::vector<Change> changes{
      {"fewer ranks", run_of(3), run_of(2)},    {"more ranks", run_of(2), run_of(3)},
      {"one rank", run_of(2), run_of(1)},       {"many ranks", run_of(1), run_of(5)},
      {"from 2 to 3", run_of(3, 2), run_of(2)}, {"from 3 to 2", run_of(2), run_of(3, 2)},
      {"to stage 0", run_of(3), run_of(2, 0)},  {"from stage 0", run_of(2, 0), run_of(3)},
      {"other tiles", run_of(2), run_of(2)},    {"other units", run_of(3, 2), run_of(2)},
      {"parameters too", run_of(3), run_of(2)}, {"copies of the parameters", run_of(2), run_of(4)},
      {"no more copies", run_of(4), run_of(3)},
  };
  const auto named = [&](std::string_view what) -> Change& { return *std::ranges::find(changes, what, &Change::what); };
  named("other tiles").after.options.tile_elements = 128;
  named("other units").after.model = in_two_units();
  named("parameters too").after.options.parameters = all_in(Tier::nvme);
  named("copies of the parameters").after.options.parameter_replicas = 2;
  named("no more copies").before.options.parameter_replicas = 2;
  return changes;
}

}  // namespace

TEST_CASE("a run continues on other ranks, in other stages, units and tiles, with the same bits") {
  for (Change& change : changes()) {
    INFO(change.what);
    const TemporaryDirectory directory;
    const Ended before = begun(change.before, directory);
    change.after.directory = directory.path();
    check_resumes(change.after, before.values);
    CHECK_FALSE(std::filesystem::exists(directory_of(change.after, change.after.ranks)));
    check_resumes(change.after, before.values);  // the run then resumes in place
    const Ended there = train(change.after, 1);
    change.before.data = 1;
    const Ended back = train(change.before, 0);
    CHECK(back.began_at == std::vector<std::uint64_t>(change.before.ranks, steps_before + 1));
    CHECK((back.values == there.values));
  }
}

TEST_CASE("a run continues in other state formats as a checkpoint does") {
  for (const auto& [before, after] :
       {std::pair(StateFormat::split, StateFormat::compact), std::pair(StateFormat::four_bit, StateFormat::fp32),
        std::pair(StateFormat::compact, StateFormat::four_bit)}) {
    CAPTURE(name(before), name(after));
    const TemporaryDirectory directory;
    KeptRun run = run_of(3);
    run.options.format = before;
    const Ended ended = begun(run, directory);
    run.ranks = 2;
    run.options.format = after;
    check_resumes(run, rounded_to(ended.values, after, run.model));
  }
}

// Each rank sees the drives of its host only. A launcher may number the hosts in another order each time.
TEST_CASE("ranks read records on other hosts through the ranks there") {
  const TemporaryDirectory directory;
  KeptRun run = run_of(3);
  run.hosts = {"a", "a", "b"};
  const Ended before = begun(run, directory);
  for (const std::vector<std::string>& hosts : {std::vector<std::string>{"b", "a"},
                                                {"b", "a", "a", "b"},
                                                {"a", "b", "b", "a"},
                                                {"b", "a", "c"},
                                                {"c", "b", "a"},
                                                {"a", "b", "c", "c"}}) {
    CAPTURE(hosts);
    run.hosts = hosts;
    run.ranks = hosts.size();
    check_resumes(run, before.values);
    check_resumes(run, before.values);
  }
}

// A tile that ranks pass on begins as zeros, so padding is zero too.
TEST_CASE("records that come from other hosts have the bytes of those that the rank reads itself") {
  const TemporaryDirectory directory;
  const TemporaryDirectory together;
  KeptRun run = run_of(3);
  run.hosts = {"a", "a", "b"};
  begun(run, directory);
  for (const char* host : {"a", "b"})
    std::filesystem::copy(directory.path() / host, together.path(), std::filesystem::copy_options::recursive);
  const auto payloads_after = [&](const std::vector<std::string>& hosts, const std::filesystem::path& drives) {
    run.ranks = 2;
    run.hosts = hosts;
    run.directory = drives;
    CHECK(train(run, 0).failures == no_failures(run.ranks));
    std::vector<std::byte> payloads;
    for (std::size_t rank = 0; rank < run.ranks; ++rank) {
      const auto queue = offload::open_queue();
      const auto folder = (hosts.empty() ? drives : drives / hosts[rank]) / fmt::format("mine-rank-{}", rank);
      const offload::Drive drive{folder, queue.get()};
      const offload::StoreOptions options{.name = "state-2"};
      const auto store =
          offload::RecordStore::open(offload::RecordStore::look({&drive, 1}, options)->shape, {&drive, 1}, options);
      const HostPages memory = map_host_pages(store.record_bytes(), "a record");
      for (std::size_t tile = 0; tile < store.shape().tiles; ++tile) {
        const auto payload = store.read(tile, {memory.get(), store.record_bytes()}).payload();
        payloads.insert(payloads.end(), payload.begin(), payload.end());
      }
    }
    return payloads;
  };
  const auto passed_on = payloads_after({"b", "a"}, directory.path());
  CHECK((passed_on == payloads_after({}, together.path())));
}

TEST_CASE("a run of which a host is gone is refused with the ranks whose records are missing") {
  const TemporaryDirectory directory;
  KeptRun run = run_of(4);
  run.hosts = {"a", "a", "b", "b"};
  const Ended before = begun(run, directory);
  run.ranks = 2;
  run.hosts = {"a", "a"};
  check_refused(run, Contains("B1009 cannot resume run \"mine\": no rank finds the records of ranks 2; 3") &&
                         Contains("the records of all 4 ranks that trained together") && Contains("load a checkpoint"));
  run.hosts = {"a", "b"};
  check_resumes(run, before.values);
}

TEST_CASE("in stage 0 the records of any rank are enough") {
  const TemporaryDirectory directory;
  KeptRun run = run_of(3, 0);
  const Ended before = begun(run, directory);
  for (const std::size_t rank : {0u, 2u})
    std::filesystem::remove_all(directory_of(run, rank));
  run.ranks = 2;
  check_resumes(run, before.values);
}

TEST_CASE("a run that moves keeps its notes") {
  const TemporaryDirectory directory;
  KeptRun run = run_of(3);
  begun(run, directory, 1);
  const auto text_of = [](const std::vector<std::byte>& note) {
    return std::string(reinterpret_cast<const char*>(note.data()), note.size());
  };
  run.options.drives = {.directories = {run.directory}, .run = "mine"};
  using Look = std::function<void(Training & training, std::size_t rank)>;
  // Returns the notes that the ranks begin with.
  const auto on_ranks = [&](std::size_t ranks, const Look& look) {
    std::vector<std::string> notes(ranks);
    CHECK(failures_of_ranks(ranks, [&](Communicator& world) {
            Training training(run.model, world, run.rules, run.options);
            training.start(initial_parameters());
            notes[world.rank()] = text_of(training.note());
            look(training, world.rank());
          }) == no_failures(ranks));
    return notes;
  };
  const Look nothing = [](Training&, std::size_t) {};
  on_ranks(3, [&](Training& training, std::size_t rank) {
    const std::string note = fmt::format("of rank {}", rank);
    training.set_note(std::as_bytes(std::span(note)));
    TrainingState(training).change([](const LocalTile&) {});
  });
  CHECK(on_ranks(2, nothing) == std::vector<std::string>{"of rank 0", "of rank 1"});
  run.model = in_two_units();
  EarlierNotes earlier;
  run.options.drives.join_notes = [&](const EarlierNotes& notes) {
    earlier = notes;
    return notes.notes.back();
  };
  CHECK(on_ranks(1, nothing) == std::vector<std::string>{"of rank 1"});
  CHECK(earlier.places == std::vector<std::size_t>{2, 1, 0, 4, 3});
  CHECK(earlier.notes.size() == 2);
}

TEST_CASE("the newest step that all earlier ranks have, with all its records, is adopted") {
  const TemporaryDirectory directory;
  const TemporaryDirectory elsewhere;
  KeptRun run = run_of(3);
  const Ended at_3 = begun(run, directory);
  replace(elsewhere.path() / "rank 1", directory_of(run, 1));
  train(run, 1);
  replace(directory_of(run, 1), elsewhere.path() / "rank 1");  // it has not committed step 4
  SECTION("as one rank lacks the last one") {
    run.ranks = 2;
    check_resumes(run, at_3.values);
  }
  SECTION("but not if its records are damaged, and there is no other one") {
    const auto queue = offload::open_queue();
    const offload::Drive drives[] = {{directory_of(run, 0), queue.get()}};
    const offload::RecordPlaces places(offload::RecordStore::look(drives)->shape, 1);
    std::fstream file(directory_of(run, 0) / "state.records", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(places.offset_of(1, steps_before + 2) + 100));
    file.put('!');
    file.close();
    run.ranks = 2;
    check_refused(run, Contains("B3202 cannot resume run \"mine\": its ranks have no commit in common") &&
                           Contains("rank 0 has step 4 (commit 5 of incarnation 2), and records that are damaged"));
  }
}

// --- Crashes: the old records are there and the new ones, as a whole or in part.

TEST_CASE("new records count once all ranks have committed them, whatever is left of the old ones") {
  const TemporaryDirectory directory;
  const TemporaryDirectory old;
  const TemporaryDirectory both;
  KeptRun run = run_of(3);
  const Ended before = begun(run, directory);
  std::filesystem::copy(directory.path(), old.path(), std::filesystem::copy_options::recursive);
  run.ranks = 2;
  check_resumes(run, before.values);
  const auto restore = [&](std::size_t rank, std::string_view file) {
    std::filesystem::create_directories(directory_of(run, rank));
    std::filesystem::copy_file(old.path() / directory_of(run, rank).filename() / file, directory_of(run, rank) / file);
  };
  for (const std::size_t rank : {0u, 1u, 2u})
    restore(rank, "state.records");
  const auto remove_new = [&](std::size_t rank) {
    for (const auto& entry : std::filesystem::directory_iterator(directory_of(run, rank))) {
      if (entry.path().filename().string().starts_with("state-")) std::filesystem::remove(entry.path());
    }
  };
  const std::size_t ranks = GENERATE(2u, 3u, 1u);
  run.ranks = ranks;
  CAPTURE(ranks);
  SECTION("all of both are there") {
    for (const std::size_t rank : {0u, 1u, 2u})
      restore(rank, "state.description");
    check_resumes(run, before.values);
  }
  SECTION("the old ones are partly removed") {
    std::filesystem::remove(directory_of(run, 1) / "state.records");
    check_resumes(run, before.values);
  }
  SECTION("one new rank has not committed") {
    for (const std::size_t rank : {0u, 1u, 2u})
      restore(rank, "state.description");
    remove_new(1);
    check_resumes(run, before.values);
  }
}

namespace {

std::vector<std::filesystem::path> left_over(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    const std::filesystem::path file = entry.path();
    const bool is_description = file.extension() == ".description";
    const bool is_alone =
        is_description && !std::filesystem::exists(std::filesystem::path(file).replace_extension(".records"));
    if (is_alone || file.extension() == ".unfinished") found.push_back(file);
  }
  return found;
}

}  // namespace

// Ranks agree after each thing that they do, so every state in which a process can leave the files comes between two agreements.
TEST_CASE("a run that is killed while other ranks take it over has the old records or the new ones") {
  const TemporaryDirectory original;
  KeptRun begins = run_of(3);
  const Ended before = begun(begins, original);
  bool is_killed = true;
  std::size_t kills = 0;
  for (std::size_t agreement = 1; is_killed; agreement += every(7)) {
    CAPTURE(agreement);
    const TemporaryDirectory directory;
    std::filesystem::copy(original.path(), directory.path(), std::filesystem::copy_options::recursive);
    KeptRun run = run_of(2);
    run.directory = directory.path();
    run.killed_at = agreement;
    is_killed = ChildProcess([&] { train(run, 0); }).ends_killed();
    kills += is_killed ? 1u : 0u;
    run.ranks = 1 + agreement % 4;
    run.killed_at = SIZE_MAX;
    check_resumes(run, before.values);
  }
  CHECK(kills >= 30 / every(7));
}

TEST_CASE("files that a killed adoption has not finished are removed, although it is not repeated") {
  const TemporaryDirectory directory;
  KeptRun run = run_of(3);
  const Ended before = begun(run, directory);
  run.ranks = 2;
  REQUIRE(ChildProcess([&] {
            filter(SYS_fsync, SECCOMP_RET_KILL_PROCESS);  // the description is written, and not renamed
            train(run, 0);
          }).ends_killed());
  const auto left = left_over(directory.path());
  REQUIRE(left.size() > 0);
  CHECK(left[0].filename() == "state-2.description.unfinished");
  std::filesystem::create_directories(directory_of(run, 4));
  for (const std::string_view file : {"state-2.description", "state-2.records.unfinished", "mirror-3.description"})
    std::ofstream(directory_of(run, 4) / file) << "of a process that was killed a little later";
  std::ofstream(directory_of(run, 0) / "mine.unfinished") << "not of Ballast";
  run.ranks = 3;
  check_resumes(run, before.values);
  CHECK(left_over(directory.path()) == std::vector{directory_of(run, 0) / "mine.unfinished"});
  CHECK_FALSE(std::filesystem::exists(directory_of(run, 4)));
}

// A failure of one rank, where the others have heard that all ranks have committed, or have not: some of them may have removed
// their old records, so the new ones stay.
TEST_CASE("a run that fails on one rank while other ranks take it over has the old records or the new ones") {
  const TemporaryDirectory original;
  KeptRun begins = run_of(3);
  const Ended before = begun(begins, original);
  bool has_failed = true;
  bool has_removed = false;
  for (std::size_t agreement = 26; has_failed; ++agreement) {  // the first failure comes a little before the commit
    CAPTURE(agreement);
    const TemporaryDirectory directory;
    std::filesystem::copy(original.path(), directory.path(), std::filesystem::copy_options::recursive);
    KeptRun run = run_of(2);
    run.directory = directory.path();
    run.fails_at = agreement;
    has_failed = !train(run, 0).failures.back().empty();
    has_removed = has_removed || (has_failed && !std::filesystem::exists(directory_of(run, 0) / "state.records"));
    CHECK((agreement > 26 || (has_failed && !has_removed)));
    run.fails_at = SIZE_MAX;
    check_resumes(run, before.values);
  }
  CHECK(has_removed);
}

// Some ranks may have commits of the last incarnation that do not count, because another rank has none.
TEST_CASE("each start of a run commits with an incarnation that is higher than all before it") {
  const TemporaryDirectory directory;
  const TemporaryDirectory elsewhere;
  KeptRun run = run_of(3);
  const auto newest_of = [&](std::size_t rank) {
    const auto queue = offload::open_queue();
    const offload::Drive drives[] = {{directory_of(run, rank), queue.get()}};
    std::uint64_t newest = 0;
    for (const RecordFiles& files :
         record_files_on(directory.path(), "mine", [&](auto each) { return each == rank; })) {
      newest =
          std::max(newest, offload::RecordStore::look(drives, {.name = files.name()})->commits[0].point.incarnation);
    }
    return newest;
  };
  begun(run, directory, 1);
  train(run, 1);
  replace(elsewhere.path() / "rank 1", directory_of(run, 1));
  std::uint64_t highest = 2;
  CHECK(newest_of(0) == highest);
  for (const std::size_t ranks : {3u, 2u, 2u, 3u}) {  // the run resumes in place, or other ranks adopt it
    CAPTURE(ranks);
    if (run.ranks == 3) {
      train(run, 1);
      highest = newest_of(0);
      replace(directory_of(run, 1), elsewhere.path() / "rank 1");  // it has not committed that step
    }
    const std::size_t steps = ranks == run.ranks ? 1 : 0;  // an adoption commits without one
    run.ranks = ranks;
    CHECK(train(run, steps).failures == no_failures(ranks));
    for (std::size_t rank = 0; rank < ranks; ++rank)
      CHECK(newest_of(rank) > highest);
    highest = newest_of(0);
    replace(elsewhere.path() / "rank 1", directory_of(run, 1));
  }
}
