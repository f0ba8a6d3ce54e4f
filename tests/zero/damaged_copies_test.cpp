// Tests of damage to one of two copies of a run's records, or to the only one.
#include "offload/record_store.h"
#include "tests/zero/mirrored_run.h"
#include "zero/runs/adopt_run.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

void overwrite(const std::filesystem::path& file, std::uint64_t begin, std::size_t bytes) {
  std::fstream written(file, std::ios::in | std::ios::out | std::ios::binary);
  written.seekp(static_cast<std::streamoff>(begin));
  written << std::string(bytes, 'x');
}

struct BytesOfFile {
  std::filesystem::path file{};
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Finds the run, and takes it over, where the drive cannot read these bytes.
std::vector<std::string> settle_without(const KeptRun& run, const BytesOfFile& unreadable, Log& log,
                                        bool begins_again = false) {
  return failures_of_ranks(run.ranks, [&](Communicator& world) {
    RecordOptions drives = run.options.drives;
    drives.directories = {drive_of(run, run.directory, world.rank())};
    drives.run = "mine";
    drives.log = &log;
    drives.begins_again = begins_again;
    TrainingOptions options = run.options;
    options.drives = drives;
    const Plan plan(run.model, {world.rank(), world.size()}, run.rules, options);
    const auto queue = offload::thread_queue({}, [&](const offload::IoRequest& request) -> std::int64_t {
      const bool fails = request.kind == offload::IoKind::read && request.file->path() == unreadable.file &&
                         request.offset >= unreadable.begin && request.offset < unreadable.end;
      return fails ? -EIO : offload::system_call(request);
    });
    const CompiledPlan& compiled = ballast::compiled(plan);
    OwnRun own{
        {drives, {queue.get()}}, compiled, describe(compiled), compiled.blocks().shape(compiled.tiles_on_drive())};
    own.shape.rank = static_cast<std::uint32_t>(world.rank());
    own.shape.content_digest = digest_of(own.description);
    settle_run(own, world).remove_others({});
  });
}

// Flips a bit of a tile that a run has committed after a step. The commit of the initial values is the second generation.
void damage_step(const std::filesystem::path& file, std::uint64_t step) {
  const auto queue = offload::open_queue();
  const offload::Drive drives[] = {{file.parent_path(), queue.get()}};
  const offload::RecordPlaces places(offload::RecordStore::look(drives)->shape, 1);
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  const auto at = static_cast<std::streamoff>(places.offset_of(1, step + 2) + offload::block_bytes + 100);
  bytes.seekg(at);
  const int before = bytes.get();
  bytes.seekp(at);
  bytes.put(static_cast<char>(before ^ 1));
}

}  // namespace

TEST_CASE("a rank whose own records are old starts from their mirror") {
  const TemporaryDirectory directory;
  const TemporaryDirectory elsewhere;
  KeptRun run = mirrored_run({"a", "b"});
  begun_values(run, directory);
  const std::filesystem::path records = records_of(run, "b", 1, "state");
  std::filesystem::copy(records, elsewhere.path() / "old");
  const AllValues values = begun_values(run, directory, 2);
  std::filesystem::copy(elsewhere.path() / "old", records, std::filesystem::copy_options::overwrite_existing);
  check_hosts_resume(run, values, steps_before + 2);
  CHECK_FALSE(std::filesystem::exists(records));
  check_hosts_resume(run, values, steps_before + 2);
}

TEST_CASE("the first rank starts from a mirror too") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  const AllValues values = begun_values(run, directory);
  overwrite(records_of(run, "a", 0, "state"), 0, offload::block_bytes);
  check_hosts_resume(run, values);
}

TEST_CASE("a rank whose drive cannot read its own records starts from their mirror") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  const AllValues values = begun_values(run, directory);
  BytesOfFile unreadable{.file = records_of(run, "b", 1, "state")};
  const std::uint64_t first_commit = offload::RecordPlaces::commit_offset(0);
  const std::uint64_t first_record = first_commit + 2 * offload::commit_bytes;
  SECTION("their first block") { unreadable.end = 1; }
  SECTION("their commits") { unreadable.begin = first_commit, unreadable.end = first_record; }
  SECTION("the head of a record") { unreadable.begin = first_record, unreadable.end = UINT64_MAX; }
  std::string lines;
  Log log([&](Level, std::string_view line) { lines += std::string(line) + '\n'; });
  CHECK(settle_without(run, unreadable, log) == std::vector<std::string>(2));
  CHECK_THAT(lines, Contains("read failed: Input/output error") && Contains(unreadable.file.string()));
  CHECK_FALSE(std::filesystem::exists(unreadable.file));
  check_hosts_resume(run, values);
}

TEST_CASE("a run does not begin again while a drive cannot read its only records") {
  const TemporaryDirectory directory;
  KeptRun run = on(mirrored_run({"a", "b"}), {"a", "b"}, false);
  const AllValues values = begun_values(run, directory);
  const std::filesystem::path records = records_of(run, "b", 1, "state");
  const std::uint64_t first_record = offload::RecordPlaces::commit_offset(0) + 2 * offload::commit_bytes;
  Log log([](Level, std::string_view) {});
  for (const auto& [begin, end] : {std::pair<std::uint64_t, std::uint64_t>{0, 1}, {first_record, UINT64_MAX}}) {
    CHECK_THAT(settle_without(run, {records, begin, end}, log, true)[1],
               Contains("B3201") && Contains(records.string()));
    check_hosts_resume(run, values);
  }
}

TEST_CASE("where the only records of a step are damaged, all ranks resume from the step before") {
  const TemporaryDirectory directory;
  KeptRun run = on(mirrored_run({"a", "b"}), {"a", "b"}, false);
  const AllValues values = begun_values(run, directory, steps_before - 1);
  begun_values(run, directory, 1);
  const std::filesystem::path records = records_of(run, "b", 1, "state");
  std::string lines;
  Log log([&](Level, std::string_view line) { lines += std::string(line) + '\n'; });
  run.options.drives.log = &log;
  damage_step(records, steps_before);
  CHECK_THAT(train(run, 0).failures[1], Contains("B3202 cannot use a record"));
  for (int start = 0; start < 2; ++start)  // no start has made a step yet
    check_hosts_resume(run, values, steps_before - 1);
  run.data = 1;
  const AllValues after = begun_values(run, directory, 1);  // overwrites the damage
  check_hosts_resume(run, after, steps_before);
  CHECK_FALSE(offload::is_marked_damaged(records));
  CHECK_THAT(lines, Contains("the only records of step 3 of run \"mine\" are damaged: resumes after step 2 instead"));
  damage(records);  // it has both steps
  for (int start = 0; start < 2; ++start)
    CHECK_THAT(train(run, 0).failures[1], Contains("B3202 cannot use a record"));
  CHECK_THAT(lines, Contains("cannot go back: not all ranks have an earlier commit that is intact"));
}

TEST_CASE("damage in one of two copies is found, and the other one is read") {
  for (const bool damages_mirror : {true, false}) {
    CAPTURE(damages_mirror);
    const TemporaryDirectory directory;
    KeptRun run = mirrored_run({"a", "b"});
    const AllValues values = begun_values(run, directory);
    damage(damages_mirror ? records_of(run, "b", 0, "mirror") : records_of(run, "b", 1, "state"));
    check_hosts_resume(on(run, {"b", "a", "a"}, false), values);  // rank 0 sees the damaged copy
  }
}

TEST_CASE("a rank whose own records are damaged starts from their mirror") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  const AllValues values = begun_values(run, directory);
  const std::filesystem::path records = records_of(run, "b", 1, "state");
  SECTION("in the first block") { overwrite(records, 0, offload::block_bytes); }
  SECTION("in the commits") { overwrite(records, offload::RecordPlaces::commit_offset(0), 2 * offload::commit_bytes); }
  SECTION("in the head of a record") { damage(records, 100); }
  SECTION("because the end is lost") { std::filesystem::resize_file(records, std::filesystem::file_size(records) / 2); }
  SECTION("in a record that the start reads") {
    damage(records);
    const Ended failed = train(run, 0);
    CHECK_THAT(failed.failures[1], Contains("B3202 cannot use a record"));
    CHECK(offload::is_marked_damaged(records));
  }
  check_hosts_resume(run, values);
  CHECK_FALSE(std::filesystem::exists(records));
  CHECK_FALSE(offload::is_marked_damaged(records));
  check_hosts_resume(run, values);
}

TEST_CASE("a mirror of which a read has failed is made again") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  const AllValues values = begun_values(run, directory);
  const std::filesystem::path mirror = records_of(run, "b", 0, "mirror");
  damage(mirror);
  offload::mark_damaged(mirror);
  check_hosts_resume(run, values);
  lose(run, "a");
  check_hosts_resume(on(run, {"b"}, false), values);
}

TEST_CASE("damaged records without another copy stay, and the error says what is damaged") {
  const TemporaryDirectory directory;
  KeptRun run = on(mirrored_run({"a", "b"}), {"a", "b"}, false);
  begun_values(run, directory);
  const std::filesystem::path records = records_of(run, "b", 1, "state");
  SECTION("the first block") {
    overwrite(records, 0, offload::block_bytes);
    CHECK_THAT(train(run, 0).failures[1], Contains("B3202 cannot open the file: it is not a record file"));
  }
  SECTION("a record") {
    damage(records);
    for (int start = 0; start < 2; ++start)
      CHECK_THAT(train(run, 0).failures[1], Contains("B3202 cannot use a record"));
  }
  SECTION("nothing but the mark") {
    offload::mark_damaged(records);
    CHECK(train(run, 0).failures == std::vector<std::string>(2));
    CHECK_FALSE(offload::is_marked_damaged(records));
  }
  CHECK(std::filesystem::exists(records));
}

TEST_CASE("damage in the only copy is an error") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  begun_values(run, directory);
  damage(records_of(run, "b", 0, "mirror"));
  lose(run, "a");
  check_refused(on(run, {"b"}, false), Contains("B3202") && Contains("mirror.records, tile 1"));
}
