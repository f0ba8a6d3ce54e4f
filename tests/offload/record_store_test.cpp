#include <ballast/error.h>

#include "offload/record_store.h"

#include <sys/resource.h>
#include <catch2/catch.hpp>

#include <cerrno>
#include <fstream>

#include "tests/offload/descriptors.h"
#include "tests/offload/faulty_calls.h"
#include "tests/offload/store_rig.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::offload;
using Catch::Contains;

namespace {

// Sanitizers keep hundreds of MiB of freed memory for a while. The address sanitizer finds leaks by itself.
constexpr std::size_t pages_of_noise =
    testing::sanitized ? 450 << 8 : 500;  // 2 MiB: 200 bytes lost with each open would be too many

// Changes a file behind the store's back.
void flip_byte(const std::filesystem::path& path, std::uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ 4));
}

}  // namespace

TEST_CASE("a committed generation is read by this store and by a reopened one, on one drive or several") {
  for (const std::size_t drives : {1u, 2u, 4u}) {
    StoreRig rig(drives);
    RecordStore store = rig.create();
    CHECK(store.generation() == 1);
    CHECK(store.step() == 0);
    for (std::uint64_t step = 1; step < 6; ++step) {
      rig.write_step(store, step);
      CHECK(store.generation() == step + 1);
      CHECK(rig.holds_step(store, step));
      const RecordStore again = rig.open();
      CHECK(again.step() == step);
      CHECK(rig.holds_step(again, step));
      CHECK(std::ranges::equal(again.note(), rig.note(step)));
    }
  }
}

TEST_CASE("committed records are read as chunks, and others in their places are named") {
  StoreRig rig(2);
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  rig.write_step(store, 2);
  std::vector<ChunkPlace> places;
  for (std::size_t tile = 0; tile < rig.shape.tiles; ++tile)
    places.push_back(store.place_of(tile));
  const std::vector files{rig.file(0), rig.file(1)};
  const auto problem_of = [&](const ChunkPlace& place) -> std::string {
    try {
      ChunkReader(files, {place}, *rig.drives()[0].queue).next();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  ChunkReader reader(files, places, *rig.drives()[0].queue);
  for (std::size_t tile = 0; tile < rig.shape.tiles; ++tile)
    CHECK(std::ranges::equal(reader.next(), store.read(tile, rig.record()).payload()));

  ChunkPlace other = places[1];
  other.chunk.offset = places[3].chunk.offset;
  CHECK_THAT(problem_of(other), Contains("B3202 cannot use a record: it is tile 3, written to the wrong place") &&
                                    Contains(files[1].string() + ", tile 1, generation 3"));
  flip_byte(files[0], places[2].chunk.offset + block_bytes + rig.shape.first_bytes);
  CHECK_THAT(problem_of(places[2]), Contains("its payload is damaged"));
  CHECK(problem_of(places[0]).empty());
  rig.write_step(store, 3);
  CHECK(problem_of(places[0]).empty());  // the last generation but one stays
  rig.write_step(store, 4);
  CHECK_THAT(problem_of(places[0]), Contains("it is of generation 5"));
}

TEST_CASE("a store with fewer tiles than drives is opened again") {
  StoreRig rig(3);
  rig.shape.tiles = 1;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  CHECK(rig.holds_step(rig.open(), 1));
}

TEST_CASE("a new store is all zeros") {
  StoreRig rig;
  const RecordStore store = rig.create();
  for (std::size_t tile = 0; tile < rig.shape.tiles; ++tile) {
    const auto payload = store.read(tile, rig.record()).payload();
    CHECK(std::ranges::count(payload, std::byte{0}) == static_cast<std::ptrdiff_t>(rig.shape.payload_bytes));
  }
}

TEST_CASE("the first region is read alone, into less memory") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  const auto whole = store.read(2, rig.record()).payload();
  const std::vector<std::byte> expected(whole.begin(), whole.begin() + static_cast<int>(rig.shape.first_bytes));
  const auto first = store.read_first(2, rig.record().first(store.first_record_bytes())).payload();
  CHECK(std::ranges::equal(first, expected));
}

TEST_CASE("uncommitted writes are visible to their store only, and disappear when abandoned") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  rig.write_tiles(store, 2);
  CHECK(rig.holds_tiles(store, 2));
  CHECK(rig.holds_step(rig.open(), 1));
  store.abandon();
  CHECK(rig.holds_step(store, 1));
  CHECK_THROWS_WITH(store.commit(2), Catch::Contains("B1007") && Catch::Contains("tile 0"));
  rig.write_step(store, 3);
  CHECK(rig.holds_step(rig.open(), 3));
}

TEST_CASE("after finish() no read or write is in flight, whether they fail or not") {
  const auto calls = std::make_shared<FaultyCalls>();
  StoreRig rig;
  rig.use(thread_queue({.depth = 4}, [calls](const IoRequest& request) { return (*calls)(request); }));
  RecordStore store = rig.create();
  const Fault late{.what = Fault::What::delay, .amount = 100};
  calls->plan(IoKind::read, {late, {.error = EIO}, late});
  calls->plan(IoKind::write, {late});
  const Aligned memory(4 * rig.record().size());
  const auto at = [&](std::size_t i) { return memory.span().subspan(i * rig.record().size(), rig.record().size()); };
  const PendingRead reads[] = {store.read(0, at(0)), store.read(1, at(1)), store.read_first(2, at(2))};
  const Completion written = store.write(3, at(3));
  CHECK_FALSE(std::ranges::all_of(reads, [](const PendingRead& read) { return read.completion().is_done(); }));
  CHECK_NOTHROW(store.finish());
  CHECK(std::ranges::all_of(reads, [](const PendingRead& read) { return read.completion().is_done(); }));
  CHECK(written.is_done());
  CHECK_NOTHROW(store.finish());
}

TEST_CASE("a request that does not fit its record is refused before it touches others") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  rig.write_tiles(store, 2);
  CHECK_THROWS_WITH(store.write(rig.shape.tiles, rig.record()), Catch::Contains("B1001"));
  CHECK_THROWS_AS(store.read(rig.shape.tiles, rig.record()), UsageError);
  CHECK_THROWS_AS(store.read(0, rig.record().first(store.record_bytes() - 1)), UsageError);
  CHECK_THROWS_AS(store.write(0, rig.record().subspan(1)), UsageError);
  const std::vector<std::byte> much(max_note_bytes + 1);
  CHECK_THROWS_WITH(store.commit(2, much), Catch::Contains("B1003"));
  store.commit(2);
  CHECK(rig.holds_step(store, 2));
}

TEST_CASE("a flipped bit on the drive is found, its tile is named, and other tiles stay readable") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  const RecordPlaces places(rig.shape, 1);
  const std::uint64_t begin = places.offset_of(1, store.generation());
  for (const std::uint64_t byte : {0ul, 50ul, 4095ul, 4096ul, 4096 + rig.shape.payload_bytes - 1}) {
    flip_byte(rig.file(0), begin + byte);
    CHECK_THROWS_WITH(store.read(1, rig.record()).payload(),
                      Catch::Contains("B3202") && Catch::Contains("tile 1, generation 2"));
    CHECK_NOTHROW(store.read(0, rig.record()).payload());
    CHECK_NOTHROW(store.read(2, rig.record()).payload());
    flip_byte(rig.file(0), begin + byte);
  }
  CHECK(rig.holds_step(store, 1));
}

TEST_CASE("a bit flipped in transfer, a torn write and a lost write are found") {
  StoreRig rig;
  const auto calls = std::make_shared<FaultyCalls>();
  rig.use(thread_queue({}, [calls](const IoRequest& request) { return (*calls)(request); }));
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  calls->plan(IoKind::read, {{Fault::What::flipped_bit, 0, 8 * 9000}});
  CHECK_THROWS_WITH(store.read(1, rig.record()).payload(), Catch::Contains("its payload is damaged"));
  CHECK_NOTHROW(store.read(1, rig.record()).payload());

  for (const std::uint64_t reached : {0u, 2u}) {  // blocks of tile 0's new record
    calls->plan(IoKind::write, {{Fault::What::torn_write, 0, reached * block_bytes}});
    rig.write_step(store, 2 + reached);
    CHECK_THROWS_WITH(store.read(0, rig.record()).payload(), Catch::Contains("tile 0"));
    CHECK_NOTHROW(store.read(1, rig.record()).payload());
  }
}

TEST_CASE("after a torn commit record, the previous generation is opened") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  rig.write_step(store, 2);
  flip_byte(rig.file(0), RecordPlaces::commit_offset(store.generation()) + 60000);
  CHECK(rig.holds_step(rig.open(), 1));
}

TEST_CASE("a committed generation with damaged records is skipped, and the log says so") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  rig.write_step(store, 2);
  flip_byte(rig.file(0), RecordPlaces(rig.shape, 1).offset_of(3, store.generation()) + 20);
  const RecordStore again = rig.open();
  CHECK(rig.holds_step(again, 1));
  CHECK_THAT(rig.log_text(), Catch::Contains("step 2") && Catch::Contains("tile 3: its head is damaged"));
}

TEST_CASE("commits are counted by incarnation, and a store can return to the previous commit") {
  StoreRig rig;
  CHECK_FALSE(RecordStore::look(rig.drives()).has_value());
  RecordStore store = rig.create();
  CHECK(store.point() == CommitPoint{0, 1});
  store.count_from({3, 0});
  rig.write_step(store, 1);
  CHECK(store.point() == CommitPoint{3, 1});
  rig.write_tiles(store, 2);
  store.commit(2, rig.note(2), {7, 8, 9});
  CHECK(store.label() == CommitLabel{7, 8, 9});
  const auto found = RecordStore::look(rig.drives());
  REQUIRE(found.has_value());
  CHECK(found->commits[0].label == CommitLabel{7, 8, 9});
  CHECK(found->commits[1].label == CommitLabel{});
  CHECK(found->shape.run_id == rig.shape.run_id);
  REQUIRE(found->commits.size() == 2);
  CHECK(found->commits[0].point == CommitPoint{3, 2});
  CHECK(found->commits[0].step == 2);
  CHECK(found->commits[1].point == CommitPoint{3, 1});

  RecordStore again = rig.open();
  CHECK(again.point() == CommitPoint{3, 2});
  CHECK(again.label() == CommitLabel{7, 8, 9});
  CHECK_FALSE(again.go_to({2, 1}));
  CHECK(again.go_to({3, 1}));
  CHECK(again.label() == CommitLabel{});
  CHECK(rig.holds_step(again, 1));
  CHECK(std::ranges::equal(again.note(), rig.note(1)));
  again.count_from({4, again.point().number});
  rig.write_step(again, 20);
  const RecordStore last = rig.open();
  CHECK(last.point() == CommitPoint{4, 2});
  CHECK(rig.holds_step(last, 20));
}

TEST_CASE("a failed return to a generation keeps the current one") {
  StoreRig rig;
  RecordStore store = rig.create();
  store.count_from({1, 0});
  rig.write_step(store, 1);
  rig.write_step(store, 2);
  flip_byte(rig.file(0), RecordPlaces(rig.shape, 1).offset_of(3, store.generation() - 1) + 20);
  CHECK_FALSE(store.go_to({1, 1}));
  CHECK(rig.holds_step(store, 2));
}

TEST_CASE("a step that did not end may have written over the generation before the current one, which is no warning") {
  StoreRig rig;
  RecordStore store = rig.create();
  store.count_from({1, 0});
  rig.write_step(store, 1);
  rig.write_step(store, 2);
  rig.write_tiles(store, 3);
  RecordStore again = rig.open();
  CHECK_FALSE(again.go_to({1, 1}));
  CHECK(rig.holds_step(again, 2));
  CHECK(rig.log_text().empty());
}

TEST_CASE("truncated, swapped, missing and already existing files are refused") {
  StoreRig rig(2);
  { RecordStore store = rig.create(); }
  CHECK_THROWS_WITH(rig.create(),
                    Catch::Contains("B3201") && Catch::Contains("cannot make the records: there are some already"));
  CHECK(std::filesystem::exists(rig.file(0)));
  std::filesystem::rename(rig.file(0), rig.file(0).string() + "x");
  CHECK_THROWS_WITH(rig.open(), Catch::Contains("No such file"));
  std::filesystem::rename(rig.file(1), rig.file(0));
  std::filesystem::rename(rig.file(0).string() + "x", rig.file(1));
  CHECK_THROWS_WITH(rig.open(), Catch::Contains("swapped"));
  std::filesystem::rename(rig.file(0), rig.file(0).string() + "x");
  std::filesystem::rename(rig.file(1), rig.file(0));
  std::filesystem::rename(rig.file(0).string() + "x", rig.file(1));
  const auto bytes = std::filesystem::file_size(rig.file(1));
  std::filesystem::resize_file(rig.file(1), bytes - 1);
  CHECK_THROWS_WITH(rig.open(), Catch::Contains("cut off"));
  std::filesystem::resize_file(rig.file(1), 100);
  CHECK_THROWS_WITH(rig.open(), Catch::Contains("not a record file"));
}

TEST_CASE("a failed write is reported, and blocks the commit until it is repeated") {
  StoreRig rig;
  const auto calls = std::make_shared<FaultyCalls>();
  rig.use(thread_queue({}, [calls](const IoRequest& request) { return (*calls)(request); }));
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  calls->plan_error(IoKind::write, EIO);
  CHECK_THROWS_WITH(rig.write_step(store, 2), Catch::Contains("write failed: Input/output error"));
  CHECK_THROWS_WITH(store.commit(2), Catch::Contains("write failed"));
  CHECK(rig.holds_step(rig.open(), 1));
  rig.write_step(store, 2);
  CHECK(rig.holds_step(rig.open(), 2));
}

TEST_CASE("a failed read is reported and changes nothing") {
  StoreRig rig;
  const auto calls = std::make_shared<FaultyCalls>();
  rig.use(thread_queue({}, [calls](const IoRequest& request) { return (*calls)(request); }));
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  calls->plan_error(IoKind::read, ENODATA);
  CHECK_THROWS_WITH(store.read(4, rig.record()).payload(), Catch::Contains("read failed"));
  CHECK(rig.holds_step(store, 1));
}

TEST_CASE("after a failed commit, nothing is written until the store is reopened") {
  StoreRig rig;
  const auto calls = std::make_shared<FaultyCalls>();
  rig.use(thread_queue({}, [calls](const IoRequest& request) { return (*calls)(request); }));
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  rig.write_tiles(store, 2);
  calls->plan_error(IoKind::flush, EIO);
  CHECK_THROWS_WITH(store.commit(2), Catch::Contains("flush failed"));
  CHECK_THROWS_WITH(store.write(0, rig.record()), Catch::Contains("a commit has failed"));
  CHECK_THROWS_WITH(store.commit(2), Catch::Contains("open the store again"));
  RecordStore again = rig.open();
  CHECK(rig.holds_step(again, 1));
  rig.write_step(again, 2);
  CHECK(rig.holds_step(rig.open(), 2));
}

TEST_CASE("a scratch store leaves no files, and removes those of a crashed process") {
  StoreRig rig;
  std::ofstream(rig.directory(0) / ".ballast-scratch-1-0") << "stale";
  RecordStore store = rig.scratch();
  rig.write_step(store, 1);
  CHECK(rig.holds_step(store, 1));
  CHECK(std::filesystem::is_empty(rig.directory(0)));
}

TEST_CASE("a scratch store has one place for each tile, and abandon() keeps its uncommitted writes") {
  StoreRig rig;
  RecordStore store = rig.scratch();
  const auto file_bytes = [](const RecordStore& of) { return RecordPlaces(of.shape(), 1).file_bytes(0); };
  CHECK(file_bytes(rig.create()) - file_bytes(store) == rig.shape.tiles * store.record_bytes());
  rig.write_step(store, 1);
  fill_pattern(store.payload(rig.record()), 2000);
  store.write(0, rig.record());
  store.abandon();
  CHECK(holds_pattern(store.read(0, rig.record()).payload(), 2000));
  CHECK(holds_pattern(store.read(1, rig.record()).payload(), 1001));
  rig.write_step(store, 3);
  CHECK(rig.holds_step(store, 3));
}

TEST_CASE("an unfinished store of a killed process does not stop a new one") {
  StoreRig rig;
  std::ofstream(rig.file(0).string() + ".unfinished") << "half a store";
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  CHECK(rig.holds_step(rig.open(), 1));
  CHECK_FALSE(std::filesystem::exists(rig.file(0).string() + ".unfinished"));
}

TEST_CASE("a tile that is written twice holds the last write") {
  StoreRig rig;
  RecordStore store = rig.create();
  rig.write_tiles(store, 1);
  for (int time = 0; time < 50; ++time) {
    const Aligned other(store.record_bytes());
    fill_pattern(store.payload(rig.record()), 1);
    store.write(2, rig.record());
    fill_pattern(store.payload(other.span()), 1002);
    store.write(2, other.span()).wait();
  }
  store.commit(1);
  CHECK(rig.holds_step(store, 1));
}

TEST_CASE("a store that cannot be created leaves no files, and names the reason") {
  StoreRig rig;
  const auto calls = std::make_shared<FaultyCalls>();
  rig.use(thread_queue({}, [calls](const IoRequest& request) { return (*calls)(request); }));
  calls->plan(IoKind::write, {{Fault::What::delay, 0, 0}, {Fault::What::delay, 0, 0}, {Fault::What::error, ENOSPC, 0}});
  CHECK_THROWS_WITH(rig.create(), Catch::Contains("B2202"));
  CHECK(std::filesystem::is_empty(rig.directory(0)));
  CHECK_THROWS_WITH(
      RecordStore::create({.run_id = 1, .tiles = 1 << 20, .payload_bytes = std::size_t{1} << 40}, rig.drives()),
      Catch::Contains("the drive has too little space"));
  CHECK(std::filesystem::is_empty(rig.directory(0)));
}

TEST_CASE("a limit on the size of files is reported before it kills the process") {
  StoreRig rig;
  struct rlimit before {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const struct rlimit low { 100000, before.rlim_max };
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  CHECK_THROWS_WITH(rig.create(), Catch::Contains("B2202") && Catch::Contains("ulimit -f"));
  ::setrlimit(RLIMIT_FSIZE, &before);
  CHECK(rig.create().generation() == 1);
}

TEST_CASE("thousands of opens leak no descriptor and no memory") {
  const auto resident_pages = [] {
    std::size_t all = 0;
    std::size_t resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    return resident;
  };
  StoreRig rig(2);
  { RecordStore store = rig.create(); }
  for (int i = 0; i < 100; ++i) {
    rig.open();  // afterwards every cache is filled
  }
  const std::size_t descriptors = open_descriptors();
  const std::size_t pages = resident_pages();
  for (std::size_t i = 0; i < 10000; i += testing::every(5)) {
    rig.open();
  }
  CHECK(open_descriptors() == descriptors);
  CHECK(resident_pages() < pages + pages_of_noise);
}

TEST_CASE("a commit warns once of a file that was removed") {
  StoreRig rig(2);
  RecordStore store = rig.create();
  rig.write_step(store, 1);
  CHECK(rig.log_text().empty());
  std::filesystem::remove(rig.file(1));
  rig.write_step(store, 2);
  rig.write_step(store, 3);
  CHECK(rig.holds_step(store, 3));
  const std::string warning = rig.file(1).string() + " has been removed while it is in use";
  CHECK(rig.log_text().find(warning) != std::string::npos);
  CHECK(rig.log_text().find(warning) == rig.log_text().rfind(warning));
}
