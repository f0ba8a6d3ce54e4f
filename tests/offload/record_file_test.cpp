#include "offload/record_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "kernels/runtime/error.h"

using namespace ballast;
using offload::RecordFile;

namespace {

class TemporaryFile {
 public:
  TemporaryFile() : path_(std::filesystem::temp_directory_path() / ("ballast-" + std::to_string(::getpid()))) {
    std::filesystem::remove(path_);
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// While it lives, the descriptor under which this process has a file open is a pipe's.
class DescriptorOfPipe {
 public:
  explicit DescriptorOfPipe(const std::filesystem::path& path) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code none;
      if (std::filesystem::read_symlink(entry.path(), none) == path) {
        descriptor_ = std::stoi(entry.path().filename());
      }
    }
    REQUIRE(descriptor_ >= 0);
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    saved_ = ::dup(descriptor_);
    ::dup2(ends[1], descriptor_);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~DescriptorOfPipe() {
    ::dup2(saved_, descriptor_);
    ::close(saved_);
  }

 private:
  int descriptor_ = -1;
  int saved_ = -1;
};

constexpr offload::RecordShape shape{.run_id = 7, .tiles = 3, .payload_bytes = 1000};

std::vector<std::byte> pattern(std::size_t tile, std::uint64_t generation) {
  std::vector<std::byte> bytes(shape.payload_bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(i * 31 + tile * 7 + generation);
  }
  return bytes;
}

void write_generation(RecordFile& records, std::uint64_t generation) {
  for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
    records.write(tile, pattern(tile, generation));
  }
}

void check_generation(const RecordFile& records, std::uint64_t generation) {
  std::vector<std::byte> read(shape.payload_bytes);
  for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
    records.read(tile, read);
    CHECK(read == pattern(tile, generation));
  }
}

}  // namespace

TEST_CASE("a committed generation is read back, by this object and by another") {
  TemporaryFile file;
  RecordFile records = RecordFile::create(file.path(), shape);
  CHECK(records.generation() == 1);
  for (std::uint64_t generation = 2; generation < 6; ++generation) {
    write_generation(records, generation);
    records.commit();
    check_generation(records, generation);
    check_generation(RecordFile::open(file.path(), shape), generation);
  }
}

TEST_CASE("writes without a commit change nothing") {
  TemporaryFile file;
  RecordFile records = RecordFile::create(file.path(), shape);
  write_generation(records, 2);
  records.commit();
  write_generation(records, 3);
  check_generation(records, 2);
  check_generation(RecordFile::open(file.path(), shape), 2);
}

TEST_CASE("a generation is not committed before all its tiles are written") {
  TemporaryFile file;
  RecordFile records = RecordFile::create(file.path(), shape);
  records.write(0, pattern(0, 2));
  CHECK_THROWS_WITH(records.commit(), Catch::Contains("B1999"));
}

TEST_CASE("a tile that is not there, or of another size, is refused before it touches the others") {
  TemporaryFile file;
  RecordFile records = RecordFile::create(file.path(), shape);
  write_generation(records, 2);
  std::vector<std::byte> longer(shape.payload_bytes + 1);
  const std::span<std::byte> exact(longer.data(), shape.payload_bytes);
  CHECK_THROWS_WITH(records.write(1, longer), Catch::Contains("B1001") && Catch::Contains("3 tiles of 1000 bytes"));
  CHECK_THROWS_AS(records.read(1, longer), UsageError);
  CHECK_THROWS_AS(records.write(3, exact), UsageError);
  CHECK_THROWS_AS(records.read(3, exact), UsageError);
  records.commit();
  check_generation(records, 2);
}

TEST_CASE("every flipped bit of the bytes in use is found and named") {
  TemporaryFile file;
  {
    RecordFile records = RecordFile::create(file.path(), shape);
    write_generation(records, 2);
    records.commit();
  }
  const std::size_t record_bytes = 32 + shape.payload_bytes;
  const std::size_t tile_1_generation_2 = 8192 + 2 * record_bytes;
  for (std::size_t byte = 0; byte < record_bytes; byte += byte < 32 ? 1 : 37) {
    const offload::File raw(file.path(), O_RDWR);
    std::byte value{};
    raw.read(tile_1_generation_2 + byte, {&value, 1});
    const std::byte flipped = value ^ std::byte{4};
    raw.write(tile_1_generation_2 + byte, {&flipped, 1});
    const RecordFile records = RecordFile::open(file.path(), shape);
    std::vector<std::byte> read(shape.payload_bytes);
    CHECK_THROWS_WITH(records.read(1, read), Catch::Contains("tile 1, generation 2"));
    CHECK_NOTHROW(records.read(0, read));
    raw.write(tile_1_generation_2 + byte, {&value, 1});
  }
}

TEST_CASE("a torn commit record leaves the generation before it") {
  TemporaryFile file;
  RecordFile records = RecordFile::create(file.path(), shape);
  write_generation(records, 2);
  records.commit();
  const std::byte torn{0xff};
  offload::File(file.path(), O_RDWR).write(0 + 33, {&torn, 1});  // generation 2 lies in the first slot
  CHECK(RecordFile::open(file.path(), shape).generation() == 1);
}

TEST_CASE("files that are not ours are refused") {
  TemporaryFile file;
  RecordFile::create(file.path(), shape);
  auto other_run = shape;
  other_run.run_id = 8;
  auto other_shape = shape;
  other_shape.tiles = 4;
  CHECK_THROWS_WITH(RecordFile::open(file.path(), other_run), Catch::Contains("B3202"));
  CHECK_THROWS_WITH(RecordFile::open(file.path(), other_shape), Catch::Contains("B3202"));
  CHECK_THROWS_WITH(RecordFile::create(file.path(), shape), Catch::Contains("B3201"));  // exists already
  std::filesystem::resize_file(file.path(), 100);
  CHECK_THROWS_WITH(RecordFile::open(file.path(), shape), Catch::Contains("B3201"));
}

TEST_CASE("after a commit that failed, nothing is written until the file is opened again") {
  TemporaryFile file;
  RecordFile records = RecordFile::create(file.path(), shape);
  write_generation(records, 2);
  {
    const DescriptorOfPipe in_its_place(file.path());  // which cannot be flushed
    CHECK_THROWS_WITH(records.commit(), Catch::Contains("fdatasync"));
  }
  CHECK_THROWS_WITH(records.write(0, pattern(0, 3)), Catch::Contains("a commit has failed before"));
  CHECK_THROWS_WITH(records.commit(), Catch::Contains("open the file again"));
  RecordFile again = RecordFile::open(file.path(), shape);
  CHECK(again.generation() == 1);
  write_generation(again, 2);
  again.commit();
  check_generation(again, 2);
}
