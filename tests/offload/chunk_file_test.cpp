// Tests that chunks are read as they were written, and that damage is found.
#include "offload/chunk_file.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <random>

#include "tests/temporary_directory.h"

using namespace ballast::offload;
using ballast::TemporaryDirectory;
using Catch::Contains;

namespace {

constexpr ChunkWriter::Memory small_memory{.buffers = 2, .buffer_bytes = 8192};

std::vector<std::byte> bytes_of(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>(random());
  return bytes;
}

// Returns chunks of many sizes, some larger than the buffers of the writer.
std::vector<std::vector<std::byte>> some_chunks(unsigned seed) {
  std::vector<std::vector<std::byte>> chunks;
  for (const std::size_t count : {1u, 64u, 5000u, 40000u, 8192u, 3u, 100001u, 63u})
    chunks.push_back(bytes_of(count, seed++));
  return chunks;
}

struct Written {
  std::filesystem::path path;
  std::vector<std::vector<std::byte>> chunks;
  std::vector<Chunk> places{};
  std::uint64_t bytes = 0;
};

Written write(const std::filesystem::path& path, IoQueue& queue, unsigned seed) {
  Written written{path, some_chunks(seed)};
  ChunkWriter writer(path, queue, small_memory);
  for (const auto& chunk : written.chunks)
    written.places.push_back(writer.append(chunk));
  written.bytes = writer.finish();
  return written;
}

void flip_a_bit(const std::filesystem::path& path, std::uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

}  // namespace

TEST_CASE("chunks are read in any order, from several files, with little memory or much") {
  const TemporaryDirectory directory;
  const auto queue = open_queue({.depth = 4});
  const Written files[] = {write(directory.path() / "one", *queue, 1), write(directory.path() / "two", *queue, 100)};
  CHECK(std::filesystem::file_size(files[0].path) == files[0].bytes);
  std::vector<ChunkPlace> order;
  std::vector<std::vector<std::byte>> expected;
  for (const std::size_t chunk : {6u, 0u, 3u, 3u, 7u, 1u, 5u, 2u, 4u}) {
    for (const std::size_t file : {1u, 0u}) {
      order.push_back({file, files[file].places[chunk]});
      expected.push_back(files[file].chunks[chunk]);
    }
  }
  for (const std::size_t memory : {std::size_t{1}, std::size_t{1} << 24}) {
    ChunkReader reader({files[0].path, files[1].path}, order, *queue, memory);
    for (const auto& chunk : expected) {
      const auto read = reader.next();
      CHECK(reinterpret_cast<std::uintptr_t>(read.data()) % chunk_alignment == 0);
      CHECK(std::ranges::equal(read, chunk));
    }
    CHECK_THROWS_WITH(reader.next(), Contains("B1999"));
  }
}

TEST_CASE("a flipped bit is found in its chunk, and the other chunks stay readable") {
  const TemporaryDirectory directory;
  const auto queue = open_queue({.depth = 4});
  const Written file = write(directory.path() / "one", *queue, 1);
  flip_a_bit(file.path, file.places[3].offset + 12345);
  std::vector<ChunkPlace> order;
  for (const Chunk& chunk : file.places)
    order.push_back({0, chunk});
  ChunkReader reader({file.path}, order, *queue);
  for (std::size_t i = 0; i < order.size(); ++i) {
    INFO(i);
    if (i == 3) {
      CHECK_THROWS_WITH(reader.next(), Contains("B3202") && Contains(file.path.string()) &&
                                           Contains(std::to_string(file.places[3].offset)));
    } else {
      CHECK(std::ranges::equal(reader.next(), file.chunks[i]));
    }
  }
}

TEST_CASE("a missing or truncated file is named before anything is read") {
  const TemporaryDirectory directory;
  const auto queue = open_queue({.depth = 4});
  const Written file = write(directory.path() / "one", *queue, 1);
  const std::vector<ChunkPlace> order{{0, file.places.back()}};
  CHECK_THROWS_WITH(ChunkReader({directory.path() / "none"}, order, *queue), Contains("B3201") && Contains("none"));
  std::filesystem::resize_file(file.path, file.bytes - 1);
  CHECK_THROWS_WITH(ChunkReader({file.path}, order, *queue), Contains("B3202") && Contains("cut off"));
}

TEST_CASE("an existing file is not overwritten") {
  const TemporaryDirectory directory;
  const auto queue = open_queue({.depth = 4});
  write(directory.path() / "one", *queue, 1);
  CHECK_THROWS_WITH(write(directory.path() / "one", *queue, 2), Contains("B3201"));
}
