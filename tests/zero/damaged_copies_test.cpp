// Tests of damage to one of two copies of a run's records, or to the only one.
#include "offload/damage_mark.h"
#include "tests/zero/mirrored_run.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

void overwrite(const std::filesystem::path& file, std::uint64_t begin, std::size_t bytes) {
  std::fstream written(file, std::ios::in | std::ios::out | std::ios::binary);
  written.seekp(static_cast<std::streamoff>(begin));
  written << std::string(bytes, 'x');
}

}  // namespace

TEST_CASE("damage in one of two copies is found, and the other one is read") {
  for (const bool damages_mirror : {true, false}) {
    CAPTURE(damages_mirror);
    const TemporaryDirectory directory;
    KeptRun run = mirrored_run({"a", "b"});
    const AllValues values = begun(run, directory);
    damage(damages_mirror ? records_of(run, "b", 0, "mirror") : records_of(run, "b", 1, "state"));
    check_resumes(on(run, {"b", "a", "a"}, false), values);  // rank 0 sees the damaged copy
  }
}

TEST_CASE("a rank whose own records are damaged starts from their mirror") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  const AllValues values = begun(run, directory);
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
  check_resumes(run, values);
  CHECK_FALSE(std::filesystem::exists(records));
  CHECK_FALSE(offload::is_marked_damaged(records));
  check_resumes(run, values);
}

TEST_CASE("a mirror of which a read has failed is made again") {
  const TemporaryDirectory directory;
  KeptRun run = mirrored_run({"a", "b"});
  const AllValues values = begun(run, directory);
  const std::filesystem::path mirror = records_of(run, "b", 0, "mirror");
  damage(mirror);
  offload::mark_damaged(mirror);
  check_resumes(run, values);
  lose(run, "a");
  check_resumes(on(run, {"b"}, false), values);
}

TEST_CASE("damaged records without another copy stay, and the error says what is damaged") {
  const TemporaryDirectory directory;
  KeptRun run = on(mirrored_run({"a", "b"}), {"a", "b"}, false);
  begun(run, directory);
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
  begun(run, directory);
  damage(records_of(run, "b", 0, "mirror"));
  lose(run, "a");
  check_refused(on(run, {"b"}, false), Contains("B3202") && Contains("mirror.records, tile 1"));
}
