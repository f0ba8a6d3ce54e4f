// Tests of checkpoints: any training of the model loads what any other has saved, a killed save loses nothing, and what does not fit
// is refused.
#include <random>

#include "offload/checksum.h"
#include "offload/run_directory.h"
#include "tests/limited_child.h"
#include "tests/sanitizer.h"
#include "tests/skip.h"
#include "tests/zero/child_process.h"
#include "tests/zero/killed_at_call.h"
#include "tests/zero/moved_run.h"
#include "zero/checkpoint/files.h"

extern "C" int ballast_reflinks;

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// A training that loads a checkpoint, makes steps, and saves.
struct Stretch {
  std::filesystem::path load{};  // empty: it begins
  std::size_t steps = 0;
  std::filesystem::path save{};  // empty: it does not save
};

KeptRun training_of(std::size_t ranks, int stage, Tier state = Tier::device) {
  return {.model = several_units(),
          .ranks = ranks,
          .options = {.stage = stage, .state = all_in(state), .tile_elements = 256}};
}

// Ranks are threads, which may not use Catch's macros.
void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("the test expects " + what);
}

std::string note_text(const std::vector<std::byte>& note) {
  return {reinterpret_cast<const char*>(note.data()), note.size()};
}

Ended train_stretch(const KeptRun& run, const Stretch& stretch) {
  const TemporaryDirectory scratch;
  std::mutex mutex;
  Ended ended{.began_at = std::vector<std::uint64_t>(run.ranks),
              .parameters = std::vector<std::vector<std::byte>>(run.ranks)};
  ended.failures = failures_of_ranks(run.ranks, [&](Communicator& world) {
    TrainingOptions options = run.options;
    options.drives.directories = {scratch.path()};
    const bool is_last = world.rank() + 1 == run.ranks;
    KillingCommunicator killing(world, is_last ? run.killed_at : SIZE_MAX);
    FailingCommunicator group(killing, is_last ? run.fails_at : SIZE_MAX);
    Training training(run.model, group, run.rules, options);
    training.start(initial_parameters());
    const std::string host = run.hosts.empty() ? "" : run.hosts[world.rank()];
    if (!stretch.load.empty()) {
      const bool is_there = training.load(stretch.load / host);
      expect(is_there, "a checkpoint");
      expect(note_text(training.note()).starts_with("rank "), "its note");
    }
    ended.began_at[world.rank()] = training.steps();
    SyntheticTrainer trainer(run.model, world.rank());
    for (std::size_t step = 0; step < stretch.steps; ++step) {
      trainer.run(training, training.steps());
      training.step();
    }
    if (!stretch.save.empty()) {
      const std::string note = fmt::format("rank {}", world.rank());
      training.set_note(std::as_bytes(std::span(note)));
      training.save(stretch.save / host);
    }
    add_values(training, ended.values, mutex);
    for (std::size_t unit = 0; unit < run.model.units.size(); ++unit)
      add_bytes(run.model.units[unit], training.forward(unit), nullptr, ended.parameters[world.rank()]);
  });
  return ended;
}

Ended saved_by(const KeptRun& run, const std::filesystem::path& directory, std::size_t steps = steps_before) {
  Ended ended = train_stretch(run, {.steps = steps, .save = directory});
  REQUIRE(ended.failures == no_failures(run.ranks));
  return ended;
}

void check_loads(const KeptRun& run, const std::filesystem::path& directory, const AllValues& values,
                 std::size_t step = steps_before) {
  const Ended loaded = train_stretch(run, {.load = directory});
  CHECK(loaded.failures == no_failures(run.ranks));
  CHECK(loaded.began_at == std::vector<std::uint64_t>(run.ranks, step));
  CHECK((loaded.values == values));
}

template <class Matcher>
void check_refused(const KeptRun& run, const Stretch& stretch, const Matcher& as_it_should) {
  const std::filesystem::path directory = stretch.load.empty() ? stretch.save : stretch.load;
  const auto before = contents(directory);
  for (const std::string& failure : train_stretch(run, stretch).failures)
    CHECK_THAT(failure, as_it_should);
  CHECK(contents(directory) == before);
}

std::vector<KeptRun> trainings() {
  std::vector<KeptRun> all{training_of(1, 0),
                           training_of(3, 0, Tier::host),
                           training_of(2, 1),
                           training_of(3, 2, Tier::host),
                           training_of(2, 3, Tier::nvme),
                           training_of(4, 3)};
  all[3].options.tile_elements = 128;
  all[5].options.parameter_replicas = 2;
  KeptRun mixed = training_of(2, 2);
  mixed.options.state = {0.3, 0.3, 0.4};
  all.push_back(mixed);
  return all;
}

void flip_byte(const std::filesystem::path& path, std::size_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(at));
  file.put('!');
}

std::filesystem::path file_of(const std::filesystem::path& directory, const std::string& name) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.path().filename() == name) return entry.path();
  }
  throw std::runtime_error("there is no file " + name);
}

// The names of a checkpoint's files, without that of its folder.
std::set<std::string> names_of(const std::filesystem::path& directory) {
  std::set<std::string> names;
  for (const auto& [path, content] : contents(directory))
    names.insert(std::filesystem::path(path).filename().string());
  return names;
}

}  // namespace

TEST_CASE("a checkpoint has the same values in every training that loads it") {
  const std::vector<KeptRun> all = trainings();
  for (std::size_t from = 0; from < all.size(); ++from) {
    const TemporaryDirectory directory;
    const Ended before = saved_by(all[from], directory.path());
    for (std::size_t to = from % every(2); to < all.size(); to += every(2)) {
      CAPTURE(from, to);
      check_loads(all[to], directory.path(), before.values);
    }
  }
}

TEST_CASE("a training that loads its checkpoint continues with the bits of one that was not interrupted") {
  for (const KeptRun& run : trainings()) {
    CAPTURE(run.ranks, run.options.stage);
    const TemporaryDirectory directory;
    saved_by(run, directory.path());
    const Ended whole = train_stretch(run, {.steps = 2 * steps_before});
    const Ended resumed = train_stretch(run, {.load = directory.path(), .steps = steps_before});
    CHECK(resumed.failures == no_failures(run.ranks));
    CHECK(resumed.parameters == whole.parameters);
    CHECK((resumed.values == whole.values));
  }
}

TEST_CASE("a checkpoint is loaded in other state formats, rounded once") {
  const TemporaryDirectory directory;
  KeptRun run = training_of(2, 1);
  run.options.format = StateFormat::fp32;
  const Ended before = saved_by(run, directory.path());
  for (const StateFormat format : all_state_formats) {
    CAPTURE(name(format));
    KeptRun other = training_of(3, 3, Tier::host);
    other.options.format = format;
    const Ended loaded = train_stretch(other, {.load = directory.path()});
    CHECK(loaded.failures == no_failures(3));
    const TemporaryDirectory again;  // what it saves is what it keeps
    const Ended kept = train_stretch(other, {.load = directory.path(), .save = again.path()});
    check_loads(other, again.path(), kept.values);
    CHECK((kept.values == loaded.values));
  }
}

TEST_CASE("a save replaces the checkpoint of other ranks, and leaves nothing of it") {
  const TemporaryDirectory directory;
  saved_by(training_of(4, 0), directory.path());
  const Ended newer = saved_by(training_of(2, 3), directory.path(), steps_before + 1);
  check_loads(training_of(3, 1), directory.path(), newer.values, steps_before + 1);
  CHECK(names_of(directory.path()) == std::set<std::string>{"checkpoint.json", "rank-00000.data", "rank-00000.extra",
                                                            "rank-00000.json", "rank-00001.data", "rank-00001.extra",
                                                            "rank-00001.json"});
  CHECK(contents(directory.path()).size() == 7);
}

TEST_CASE("each rank gets its note, and more ranks those of the earlier ones in turns") {
  for (const int stage : {0, 3}) {
    const TemporaryDirectory directory;
    saved_by(training_of(3, stage), directory.path());
    const KeptRun run = training_of(5, 2);
    std::vector<std::string> notes(5);
    CHECK(failures_of_ranks(5, [&](Communicator& world) {
            Training training(run.model, world, run.rules, run.options);
            training.start(initial_parameters());
            expect(training.load(directory.path()), "a checkpoint");
            notes[world.rank()] = note_text(training.note());
          }) == no_failures(5));
    CHECK(notes == std::vector<std::string>{"rank 0", "rank 1", "rank 2", "rank 0", "rank 1"});
  }
}

TEST_CASE("ranks that share no directory cannot save") {
  const TemporaryDirectory directory;
  KeptRun run = training_of(2, 3);
  run.hosts = {"a", "b"};
  for (const std::string& failure : train_stretch(run, {.steps = 1, .save = directory.path()}).failures)
    CHECK_THAT(failure, Contains("B1001 cannot save a checkpoint: not all ranks see the directory"));
  CHECK(contents(directory.path()).empty());
}

// Ranks agree after each thing that they do, so every state in which a process can leave the files comes between two agreements.
TEST_CASE("a save that is killed or fails leaves the old checkpoint or the new one") {
  const bool is_killed = GENERATE(true, false);
  CAPTURE(is_killed);
  const TemporaryDirectory original;
  const Ended old = saved_by(training_of(3, 1), original.path());
  const std::size_t steps = steps_before + 1;
  const Ended newer = train_stretch(training_of(2, 3), {.steps = steps});
  bool has_ended = false;
  std::set<std::uint64_t> found;
  for (std::size_t agreement = 1; !has_ended; agreement += every(3)) {
    CAPTURE(agreement);
    const TemporaryDirectory directory;
    std::filesystem::copy(original.path(), directory.path(), std::filesystem::copy_options::recursive);
    KeptRun run = training_of(2, 3);
    const Stretch stretch{.steps = steps, .save = directory.path()};
    (is_killed ? run.killed_at : run.fails_at) = agreement;
    has_ended = is_killed ? !ChildProcess([&] { train_stretch(run, stretch); }).ends_killed()
                          : train_stretch(run, stretch).failures == no_failures(2);
    const Ended loaded = train_stretch(training_of(2, 2), {.load = directory.path()});
    REQUIRE(loaded.failures == no_failures(2));
    found.insert(loaded.began_at[0]);
    CHECK((loaded.values == (loaded.began_at[0] == steps ? newer.values : old.values)));
    saved_by(training_of(1, 0), directory.path(), 1);  // and the next save removes what is left
    CHECK(contents(directory.path()).size() == 4);
  }
  CHECK(found == std::set<std::uint64_t>{steps_before, steps});
}

TEST_CASE("a save that is killed at any call leaves the old checkpoint or the new one") {
  const TemporaryDirectory original;
  const KeptRun run = training_of(1, 3);
  const Ended old = saved_by(run, original.path());
  const std::size_t steps = steps_before + 1;
  const Ended newer = train_stretch(run, {.steps = steps});
  std::set<std::uint64_t> found;
  ChildEnd end = ChildEnd::killed;
  for (std::size_t moment = 1; end == ChildEnd::killed; moment += every(4)) {
    CAPTURE(moment);
    const TemporaryDirectory directory;
    std::filesystem::copy(original.path(), directory.path(), std::filesystem::copy_options::recursive);
    end = run_killed_at(moment, [&] { train_stretch(run, {.steps = steps, .save = directory.path()}); });
    if (end == ChildEnd::untraceable) return skip("a process may not trace its child here");
    const Ended loaded = train_stretch(run, {.load = directory.path()});
    REQUIRE(loaded.failures == no_failures(1));
    found.insert(loaded.began_at[0]);
    CHECK((loaded.values == (loaded.began_at[0] == steps ? newer.values : old.values)));
  }
  CHECK(end == ChildEnd::done);
  CHECK(found == std::set<std::uint64_t>{steps_before, steps});
}

TEST_CASE("a checkpoint that does not fit is refused, and stays as it is") {
  const TemporaryDirectory directory;
  const KeptRun run = training_of(2, 3);
  saved_by(run, directory.path());
  KeptRun other = run;
  other.model.units[0].tensors[0].shape = {29, 30};
  check_refused(other, {.load = directory.path()},
                Contains("B1009 cannot load the checkpoint in") &&
                    Contains("it has parameter weight [30, 29], but this model has [29, 30]"));
  other = run;
  other.model.units[2].tensors[0].name = "another";
  check_refused(other, {.load = directory.path()}, Contains("it lacks the trained parameter another"));
  other = run;
  other.model.units.pop_back();
  other.model.units.pop_back();
  check_refused(other, {.load = directory.path()}, Contains("trained parameter") && Contains("which this model lacks"));
  other = run;
  other.model.units[1].tensors[1].frozen = false;
  check_refused(other, {.load = directory.path()}, Contains("it has no state of fixed, which is trained here"));
  other = run;
  other.rules = {optim::SgdMomentum{}};
  check_refused(other, {.load = directory.path()},
                Contains("B1009") && Contains("it is of another update rule") && Contains("Nothing was changed"));
  SECTION("where it would replace that of another model") {
    other.model = plain_model(2, 128);
    check_refused(other, {.save = directory.path()}, Contains("B1001 cannot replace a checkpoint of another model"));
  }
  SECTION("without the data of a rank") {
    std::filesystem::remove(file_of(directory.path(), "rank-00001.data"));
    check_refused(run, {.load = directory.path()}, Contains("B3201") && Contains("rank-00001.data"));
  }
  SECTION("with data that is too short") {
    std::filesystem::resize_file(file_of(directory.path(), "rank-00001.data"), 100);
    check_refused(run, {.load = directory.path()}, Contains("B3202") && Contains("rank-00001.data"));
  }
  SECTION("without its folder") {
    std::filesystem::rename(file_of(directory.path(), "rank-00000.data").parent_path(), directory.path() / "other");
    check_refused(run, {.load = directory.path()}, Contains("B3201") && Contains("which its checkpoint.json names"));
  }
  SECTION("where its directory is in use") {
    const offload::DirectoryLock lock(directory.path());
    check_refused(run, {.save = directory.path()}, Contains("B2204"));
  }
  SECTION("where a chunk is damaged") {
    flip_byte(file_of(directory.path(), "rank-00001.data"), 50);
    check_refused(run, {.load = directory.path()},
                  Contains("B3202") && Contains("rank-00001.data") && Contains("weight, elements "));
  }
  SECTION("where the manifest, an index or a note is damaged") {
    for (const char* const name : {"checkpoint.json", "rank-00000.json", "rank-00000.extra"}) {
      CAPTURE(name);
      const std::filesystem::path file = file_of(directory.path(), name);
      const std::string whole = contents(directory.path()).at(file.string());
      flip_byte(file, 3);
      check_refused(run, {.load = directory.path()},
                    Contains("B3202 a file of the checkpoint is not what was written") && Contains(name));
      std::ofstream(file, std::ios::binary) << whole;
    }
  }
}

TEST_CASE("two trainings do not take turns in a directory") {
  const TemporaryDirectory directory;
  const KeptRun run = training_of(1, 0);
  saved_by(run, directory.path(), 1);
  CHECK(failures_of_ranks(1, [&](Communicator& world) {
          Training old(run.model, world, run.rules, run.options), other(run.model, world, run.rules, run.options);
          old.start(initial_parameters());
          other.start(initial_parameters());
          expect(old.load(directory.path() / ""), "a checkpoint");
          old.save(directory.path());
          old.save(directory.path());    // it replaces its own
          other.save(directory.path());  // a training that begins replaces what is there
          try {
            old.save(directory.path());
            throw std::runtime_error("the test expects a refusal");
          } catch (const Error& error) {
            expect(error.code() == Code::directory_in_use, "B2204");
          }
          expect(old.load(directory.path()), "the other checkpoint");
          old.save(directory.path());
        }) == no_failures(1));
}

TEST_CASE("tensors whose names would be one are not saved, and notes that are too large not loaded") {
  const TemporaryDirectory directory;
  KeptRun run = training_of(2, 3);
  saved_by(run, directory.path());
  KeptRun other = run;
  other.model = {{{.name = "a.b", .tensors = {{"c", {300}}}},
                  {.name = "x", .tensors = {{"a.b.c", {300}}}},
                  {.name = "y", .tensors = {{"c", {300}}}}}};
  check_refused(other, {.save = directory.path()},
                Contains("B1001 cannot save the training: two tensors would have the same name") && Contains("a.b.c"));
  other = run;
  other.model.units[0].tensors[0].name = "weight\xff";
  check_refused(other, {.save = directory.path()}, Contains("B1001 cannot write a file: a name is not UTF-8"));
  std::ofstream(directory.path() / "checkpoint.json").close();
  check_refused(run, {.load = directory.path()}, Contains("B3202 a file of the checkpoint is not what was written"));
}

TEST_CASE("a save or a load in the middle of a step is refused") {
  const TemporaryDirectory directory;
  const KeptRun run = training_of(1, 0);
  const auto failures = failures_of_ranks(1, [&](Communicator& world) {
    Training training(run.model, world, run.rules, run.options);
    CHECK_THROWS_WITH((void)training.load(directory.path()), Contains("it has no parameters yet"));
    training.start(initial_parameters());
    SyntheticTrainer(run.model, 0).run(training, 0);
    CHECK_THROWS_WITH(training.save(directory.path()), Contains("B1007 cannot save a checkpoint: it is in the middle"));
    CHECK_THROWS_WITH((void)training.load(directory.path()),
                      Contains("B1007 cannot load a checkpoint: it is in the middle"));
  });
  CHECK(std::filesystem::is_empty(directory.path()));
}

TEST_CASE("a directory without a checkpoint loads nothing") {
  const TemporaryDirectory directory;
  const KeptRun run = training_of(2, 3);
  CHECK(failures_of_ranks(2, [&](Communicator& world) {
          Training training(run.model, world, run.rules, run.options);
          training.start(initial_parameters());
          expect(!training.load(directory.path()), "no checkpoint");
          expect(!training.load(directory.path() / "nothing"), "no checkpoint");
        }) == no_failures(2));
  CHECK(std::filesystem::is_empty(directory.path()));
}

TEST_CASE("tiles of the sizes that the library chooses are saved and loaded") {
  const TemporaryDirectory directory;
  KeptRun run = training_of(2, 1);
  run.model = plain_model(2, (std::size_t{9} << 18) + 128);
  run.options.tile_elements = 0;
  const Ended before = saved_by(run, directory.path(), 1);
  KeptRun other = run;
  other.options.stage = 3;
  other.options.state = all_in(Tier::host);
  other.ranks = 1;
  check_loads(other, directory.path(), before.values, 1);
}

TEST_CASE("values of the trainer's own and momentum of Muon are saved and loaded") {
  for (const auto& each : {std::pair(optim::Rule(optim::External::with_values(2)), several_units()),
                           std::pair(optim::Rule(optim::Muon{.lr = 0.01}), matrix_model())}) {
    const optim::Rule& rule = each.first;
    const Model& model = each.second;
    CAPTURE(optim::name(rule));
    const TemporaryDirectory directory;
    std::vector<std::vector<float>> seen[2];
    for (const bool loads : {false, true}) {
      const std::size_t ranks = loads ? 1 : 2;
      const TrainingOptions options{.stage = 2, .format = StateFormat::fp32, .tile_elements = 256};
      std::mutex mutex;
      CHECK(failures_of_ranks(ranks, [&](Communicator& world) {
              Training training(model, world, {rule, rule}, options);
              training.start(initial_parameters());
              if (loads) expect(training.load(directory.path()), "a checkpoint");
              TensorState(training).change(
                  [&](const StatePart& part) {
                    const std::lock_guard lock(mutex);
                    for (const Moment moment : {Moment::momentum, own_value(0), own_value(1)}) {
                      const bool has = moment == Moment::momentum ? part.memory.momentum != nullptr
                                                                  : part.memory.own.count > 0 && !part.frozen;
                      if (!has) continue;
                      std::vector<float> values(part.memory.count);
                      if (!loads) {
                        for (std::size_t i = 0; i < values.size(); ++i)
                          values[i] = static_cast<float>(100 * part.tensor + (part.first + i) % 97);
                        kernels::write_moment(part.memory, moment, values);
                      }
                      kernels::read_moment(part.memory, moment, values);
                      for (std::size_t i = 0; i < values.size(); ++i)
                        expect(values[i] == static_cast<float>(100 * part.tensor + (part.first + i) % 97), "the value");
                      seen[loads].push_back(values);
                    }
                  },
                  [] {});
              if (!loads) training.save(directory.path());
            }) == no_failures(ranks));
    }
    CHECK(seen[0].size() > 0);
    CHECK(seen[1].size() > 0);
  }
}

TEST_CASE("a run on drives loads a checkpoint, and resumes after it") {
  const TemporaryDirectory directory;
  const TemporaryDirectory checkpoint;
  const Ended before = saved_by(training_of(3, 1), checkpoint.path());
  KeptRun run = run_of(2);
  run.options.drives = {.directories = {directory.path()}, .run = "mine"};
  for (const bool loads : {true, false}) {
    std::mutex mutex;
    AllValues values;
    CHECK(failures_of_ranks(2, [&](Communicator& world) {
            Training training(run.model, world, run.rules, run.options);
            training.start(initial_parameters());
            if (loads) expect(training.load(checkpoint.path()), "a checkpoint");
            expect(training.steps() == steps_before, "its steps");
            add_values(training, values, mutex);
          }) == no_failures(2));
    CHECK((values == before.values));
  }
}

namespace {

// Lets the file system clone ranges of files, or refuse to: see tests/reflinks.cpp.
struct Reflinks {
  explicit Reflinks(int clones = 1) { ballast_reflinks = clones; }
  ~Reflinks() { ballast_reflinks = -1; }
};

SavedCheckpoint read_checkpoint(const std::filesystem::path& directory) {
  return parse_checkpoint(directory, *read_manifest(directory));
}

std::size_t pieces_in_records(const SavedCheckpoint& saved) {
  std::size_t count = 0;
  for (const auto& [name, tensor] : saved.tensors)
    count += static_cast<std::size_t>(
        std::ranges::count_if(tensor.pieces, [](const SavedPiece& piece) { return piece.place.record.has_value(); }));
  return count;
}

KeptRun drive_run(std::size_t ranks, StateFormat format = StateFormat::fp32) {
  KeptRun run = training_of(ranks, 3, Tier::nvme);
  run.options.drives.run = "mine";
  run.options.format = format;
  run.options.tile_elements = 512;  // a tile has parts of two tensors
  return run;
}

}  // namespace

TEST_CASE("records of a run become a part of its checkpoint, which any training loads, without being read") {
  for (const StateFormat format : {StateFormat::fp32, StateFormat::compact, StateFormat::four_bit}) {
    for (const std::size_t ranks : {std::size_t{1}, std::size_t{2}}) {
      CAPTURE(name(format), ranks);
      const TemporaryDirectory cloned, copied;
      std::optional<Reflinks> reflinks(std::in_place);
      const Ended before = saved_by(drive_run(ranks, format), cloned.path());
      reflinks.emplace(0);
      saved_by(drive_run(ranks, format), copied.path());
      const SavedCheckpoint saved = read_checkpoint(cloned.path());
      CHECK(pieces_in_records(saved) > 0);
      CHECK(pieces_in_records(read_checkpoint(copied.path())) == 0);
      for (const auto& [name, tensor] : saved.tensors)
        CHECK(std::ranges::all_of(tensor.pieces, [&, &tensor = tensor](const SavedPiece& piece) {
          return tensor.role != "trained" || piece.place.record.has_value();
        }));
      for (KeptRun run : {training_of(1, 0), training_of(3, 1, Tier::host), drive_run(2), drive_run(3)}) {
        run.options.format = format;
        run.options.tile_elements = run.ranks == 3 ? 128 : 256;
        check_loads(run, cloned.path(), before.values);
        check_loads(run, copied.path(), before.values);
      }
    }
  }
}

TEST_CASE(
    "damage of a record in a checkpoint is found, and a killed save of a run leaves the old checkpoint or the new one") {
  const TemporaryDirectory directory;
  const Reflinks reflinks;
  saved_by(drive_run(2), directory.path());
  const auto before = contents(directory.path());
  for (std::size_t call = 1; call < 60; call += 7 * every(2)) {
    KeptRun killed = drive_run(2);
    killed.fails_at = call;
    train_stretch(killed, {.steps = 1, .save = directory.path()});
    read_checkpoint(directory.path());
  }
  const std::filesystem::path data = file_of(directory.path(), "rank-00001.data");
  flip_byte(data, std::filesystem::file_size(data) / 2);
  const std::vector<std::string> failures = train_stretch(training_of(1, 0), {.load = directory.path()}).failures;
  CHECK_THAT(failures.front(), Contains("B3202 cannot use a record"));
}

TEST_CASE("what a killed save has left takes no space of the next one") {
  const TemporaryDirectory directory;
  const KeptRun run = training_of(2, 3);
  saved_by(run, directory.path());
  std::filesystem::create_directory(directory.path() / "step-7-01234567");
  std::ofstream(directory.path() / "step-7-01234567" / "rank-00000.data") << "half of a checkpoint";
  std::filesystem::create_directory(directory.path() / "mine");  // what others have there stays
  std::ofstream(directory.path() / "mine" / "notes") << "mine";
  saved_by(run, directory.path(), 1);
  CHECK_FALSE(std::filesystem::exists(directory.path() / "step-7-01234567"));
  CHECK(contents(directory.path()).size() == 8);
}

namespace {

constexpr std::size_t around_seal = 29;  // `, "seal": "` and 16 digits, the quote, the brace and the newline

std::string sealed(const std::string& content) {
  const std::uint64_t seal = offload::checksum(std::as_bytes(std::span(content)));
  return fmt::format("{{\"content\": {}, \"seal\": \"{:016x}\"}}\n", content, seal);
}

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The content of a file of JSON, with a number or a letter changed, or a stretch removed or repeated.
std::string changed(std::string text, std::mt19937_64& random) {
  constexpr std::string_view before = "{\"content\": ";
  text = text.substr(before.size(), text.size() - before.size() - around_seal);
  const std::size_t at = random() % text.size(), length = 1 + random() % 8;
  switch (random() % 4) {
    case 0: text.erase(at, length); break;
    case 1: text.insert(at, text.substr(random() % text.size(), length)); break;
    case 2: text[at] = "0123456789-.eE[]{}\",:\\ntf"[random() % 25]; break;
    default: {
      const std::size_t digit = text.find_first_of("0123456789", at);
      constexpr const char* others[] = {"0",    "-1", "9", "1e30", "18446744073709551615", "36028797018963968",
                                        "null", "[]"};
      if (digit != std::string::npos) text.replace(digit, 1, others[random() % std::size(others)]);
    }
  }
  return text;
}

}  // namespace

TEST_CASE("files of a checkpoint with other content are refused, or read as what they say") {
  const TemporaryDirectory directory;
  const bool has_records = GENERATE(false, true);
  {
    const Reflinks reflinks;
    saved_by(has_records ? drive_run(2) : training_of(2, 3), directory.path(), 1);
    REQUIRE((pieces_in_records(read_checkpoint(directory.path())) > 0) == has_records);
  }
  const std::filesystem::path manifest = directory.path() / "checkpoint.json";
  const std::filesystem::path index = file_of(directory.path(), "rank-00001.json");
  const std::string manifest_text = text_of(manifest), index_text = text_of(index);
  const auto read_all = [&](const std::string& text) {
    const SavedCheckpoint found = parse_checkpoint(directory.path(), text);
    for (const auto& [name, tensor] : found.tensors) {
      PieceReader reader(found.files, tensor.pieces);
      for (const SavedPiece& piece : tensor.pieces)
        reader.go_to(piece, name);
      if (!tensor.kind) continue;
      std::vector<std::byte> memory(tensor.chunk_bytes(tensor.elements()));
      reader.copy(name, tensor, 0, tensor.kind->tile(memory.data(), tensor.elements()));
    }
  };
  constexpr std::string_view before_folder = "\"folder\":\"step-";
  std::string long_name = manifest_text;
  long_name.insert(long_name.find(before_folder) + before_folder.size(), std::string(1'000'000, '1'));
  constexpr std::size_t before_content = 12;
  long_name = sealed(long_name.substr(before_content, long_name.size() - before_content - around_seal));
  CHECK_THROWS_WITH(parse_checkpoint(directory.path(), long_name), Contains("B3"));
  for (std::uint64_t seed = 0; seed < 4000; seed += every(2)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    std::string text = manifest_text;
    if (seed / every(2) % 2 == 0) {
      text = sealed(changed(manifest_text, random));
    } else {
      const std::string other = sealed(changed(index_text, random));
      std::ofstream(index, std::ios::binary) << other;
      const auto seal_of = [](const std::string& of) {
        return fmt::format("{:016x}", offload::checksum(std::as_bytes(std::span(of))));
      };
      const std::string was = seal_of(index_text);
      constexpr std::string_view before = "{\"content\": ";
      std::string content = text.substr(before.size(), text.size() - before.size() - around_seal);
      content.replace(content.find(was), was.size(), seal_of(other));
      text = sealed(content);
    }
    try {
      read_all(text);
    } catch (const Error& error) {
      CHECK(error.code() != Code::internal);
    }
    std::ofstream(index, std::ios::binary) << index_text;
  }
  CHECK_NOTHROW(read_all(manifest_text));
}
