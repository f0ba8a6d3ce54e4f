// Tests on real file systems that are full or whose drive fails. They need root, because they mount file systems.
#include <ballast/error.h>

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>

#include "offload/preflight.h"
#include "tests/offload/store_rig.h"
#include "tests/skip.h"

using namespace ballast;
using namespace ballast::offload;

namespace {

// A small tmpfs with a mounted image of an ext4 file system in it. A test fills the ext4 file system, or cuts off the
// image.
class SmallDrive {
 public:
  SmallDrive() {
    std::filesystem::create_directory(below());
    std::filesystem::create_directory(path());
    mounted_ = ::mount("tmpfs", below().c_str(), "tmpfs", 0, "size=64m") == 0 &&
               run("truncate -s 24M " + image().string() + " && mkfs.ext4 -qF " + image().string() +
                   " && mount -o loop " + image().string() + " " + path().string());
  }
  ~SmallDrive() {
    run("umount -l " + path().string());
    ::umount2(below().c_str(), MNT_DETACH);
  }

  bool mounted() const { return mounted_; }
  std::filesystem::path path() const { return directory_.path() / "drive"; }
  std::filesystem::path image() const { return below() / "image"; }

  void fill() const {
    std::ofstream filler(path() / "filler", std::ios::binary);
    const std::vector<char> megabyte(1 << 20, 'x');
    while (filler.write(megabyte.data(), 1 << 20) && filler.flush()) {
    }
    filler.close();
    std::ofstream rest(path() / "rest", std::ios::binary);
    while (rest.write(megabyte.data(), 4096) && rest.flush()) {
    }
  }
  void free() const {
    std::filesystem::remove(path() / "filler");
    std::filesystem::remove(path() / "rest");
  }

 private:
  std::filesystem::path below() const { return directory_.path() / "below"; }
  static bool run(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()) == 0; }

  TemporaryDirectory directory_;
  bool mounted_ = false;
};

constexpr std::string_view no_mount = "mounting a small file system needs root, mkfs.ext4 and loop devices";

struct SmallDriveRig {
  explicit SmallDriveRig(const SmallDrive& small) : queue(open_queue()), drives{{small.path(), queue.get()}} {}

  void write_step(RecordStore& store, std::uint64_t step) {
    for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
      fill_pattern(store.payload(memory.span()), 100 * step + tile);
      store.write(tile, memory.span()).wait();
    }
    store.commit(step);
  }
  bool holds_step(const RecordStore& store, std::uint64_t step) {
    for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
      if (!holds_pattern(store.read(tile, memory.span()).payload(), 100 * step + tile)) return false;
    }
    return store.step() == step;
  }

  RecordShape shape{.run_id = 3, .tiles = 4, .payload_bytes = 1 << 20};
  std::unique_ptr<IoQueue> queue;
  Drive drives[1];
  Aligned memory{(1 << 20) + block_bytes};
};

}  // namespace

TEST_CASE("a new store on a full drive is refused before anything is written") {
  const SmallDrive small;
  if (!small.mounted()) return skip(no_mount);
  small.fill();
  SmallDriveRig rig(small);
  CHECK_THROWS_WITH(RecordStore::create(rig.shape, rig.drives),
                    Catch::Contains("B2202") && Catch::Contains(small.path().string()) && Catch::Contains("8.16 MiB"));
  CHECK_FALSE(std::filesystem::exists(small.path() / "state.records"));
  small.free();
  CHECK(RecordStore::create(rig.shape, rig.drives).generation() == 1);
}

TEST_CASE("a drive that fills up in a step fails with B2202, keeps the last step, and resumes when there is space") {
  const SmallDrive small;
  if (!small.mounted()) return skip(no_mount);
  SmallDriveRig rig(small);
  RecordStore store = RecordStore::create(rig.shape, rig.drives);
  rig.write_step(store, 1);
  // Preallocated files never run full, so the test takes their extents away, as a copy-on-write file system would do.
  const auto path = small.path() / "state.records";
  const RecordPlaces places(rig.shape, 1);
  const int file = ::open(path.c_str(), O_RDWR);
  for (std::size_t tile = 0; tile < rig.shape.tiles; ++tile) {
    REQUIRE(::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        static_cast<off_t>(places.offset_of(tile, store.generation() + 1)),
                        static_cast<off_t>(places.record_bytes())) == 0);
  }
  ::close(file);
  small.fill();
  CHECK_THROWS_WITH(rig.write_step(store, 2), Catch::Contains("B2202") && Catch::Contains("state.records"));
  store.abandon();
  CHECK(rig.holds_step(store, 1));
  CHECK(rig.holds_step(RecordStore::open(rig.shape, rig.drives), 1));
  small.free();
  rig.write_step(store, 2);
  CHECK(rig.holds_step(RecordStore::open(rig.shape, rig.drives), 2));
}

TEST_CASE("reading a drive that has lost its end fails with the file and the offset") {
  const SmallDrive small;
  if (!small.mounted()) return skip(no_mount);
  SmallDriveRig rig(small);
  RecordStore store = RecordStore::create(rig.shape, rig.drives);
  rig.write_step(store, 1);
  std::filesystem::resize_file(small.image(), 1 << 20);
  CHECK_THROWS_WITH(rig.holds_step(store, 1), Catch::Contains("B3201") && Catch::Contains("read failed") &&
                                                  Catch::Contains("state.records, byte"));
}

TEST_CASE("a drive's report measures its space and speeds, and names direct I/O") {
  const TemporaryDirectory directory;
  const auto queue = open_queue();
  const DriveReport report = inspect(directory.path(), *queue, {.bytes = 4 << 20, .request_bytes = 1 << 20});
  CHECK(report.free_bytes > 0);
  CHECK(report.read_bytes_per_second > 0);
  CHECK(report.write_bytes_per_second > 0);
  CHECK(report.both_bytes_per_second > 0);
  CHECK(std::filesystem::is_empty(directory.path()));
}
