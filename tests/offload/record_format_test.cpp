#include <ballast/error.h>

#include "offload/record_format.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <set>

#include "offload/checksum.h"
#include "tests/offload/aligned.h"

using namespace ballast;
using namespace ballast::offload;

namespace {

constexpr RecordShape shape_of_run{
    .run_id = 7, .rank = 2, .tiles = 5, .payload_bytes = 10000, .first_bytes = 3000, .content_digest = 12};
constexpr RecordName name_of_tile{.tile = 3, .generation = 9};

void flip(std::span<std::byte> bytes, std::size_t bit) { bytes[bit / 8] ^= std::byte{1} << (bit % 8); }

struct Sealed {
  Sealed() {
    fill_pattern(payload_of(shape_of_run, record), 1);
    seals = seal_record(shape_of_run, name_of_tile, record);
  }
  std::string check(RecordName name = name_of_tile) { return check_record(shape_of_run, name, seals, record); }

  Aligned memory{RecordPlaces(shape_of_run, 1).record_bytes()};
  std::span<std::byte> record = memory.span();
  Seals seals;
};

}  // namespace

TEST_CASE("records do not overlap and fit their files, for any number of files") {
  for (std::size_t files = 1; files <= 6; ++files) {
    const RecordPlaces places(shape_of_run, files);
    CHECK(places.record_bytes() == 4 * block_bytes);
    CHECK(places.first_record_bytes() == 2 * block_bytes);
    std::set<std::pair<std::size_t, std::uint64_t>> begins;
    for (std::size_t tile = 0; tile < shape_of_run.tiles; ++tile) {
      for (const std::uint64_t generation : {4u, 5u}) {
        const std::uint64_t begin = places.offset_of(tile, generation);
        const std::size_t file = places.file_of(tile);
        CHECK(begin == places.offset_of(tile, generation + 2));
        CHECK(begin >= block_bytes + 2 * commit_bytes);
        CHECK((begin - block_bytes) % block_bytes == 0);
        CHECK(begin + places.record_bytes() <= places.file_bytes(file));
        for (std::uint64_t at = begin; at < begin + places.record_bytes(); at += block_bytes) {
          CHECK(begins.insert({file, at}).second);
        }
      }
    }
    std::uint64_t blocks = 0;
    for (std::size_t file = 0; file < files; ++file) {
      const std::uint64_t heads = file < shape_of_run.tiles ? block_bytes + 2 * commit_bytes : block_bytes;
      blocks += (places.file_bytes(file) - heads) / block_bytes;
    }
    CHECK(begins.size() == blocks);
  }
}

TEST_CASE("every flipped bit of a head is found") {
  Sealed sealed;
  REQUIRE(sealed.check().empty());
  for (std::size_t bit = 0; bit < 8 * block_bytes; ++bit) {
    flip(sealed.record, bit);
    REQUIRE_FALSE(sealed.check().empty());
    flip(sealed.record, bit);
  }
  CHECK(sealed.check().empty());
}

TEST_CASE("every flipped bit of a payload is found, in the region that holds it") {
  Sealed sealed;
  for (std::size_t bit = 0; bit < 8 * shape_of_run.payload_bytes; bit += bit < 64 ? 1 : 61) {
    flip(payload_of(shape_of_run, sealed.record), bit);
    REQUIRE(sealed.check() ==
            (bit < 8 * shape_of_run.first_bytes ? "its first region is damaged" : "its payload is damaged"));
    flip(payload_of(shape_of_run, sealed.record), bit);
  }
}

TEST_CASE("the first region is checked alone when only it was read") {
  Sealed sealed;
  sealed.record = sealed.record.first(RecordPlaces(shape_of_run, 1).first_record_bytes());
  CHECK(sealed.check().empty());
  sealed.record[block_bytes + shape_of_run.first_bytes - 1] ^= std::byte{1};
  CHECK(sealed.check() == "its first region is damaged");
}

TEST_CASE("intact records of another tile, generation or run are recognized") {
  Sealed sealed;
  CHECK(sealed.check({.tile = 4, .generation = 9}) == "it is tile 3, written to the wrong place");
  CHECK(sealed.check({.tile = 3, .generation = 11}) ==
        "it is of generation 9, so a later write never reached the drive");
  RecordShape other = shape_of_run;
  other.run_id = 8;
  CHECK(check_record(other, name_of_tile, sealed.seals, sealed.record) ==
        "it belongs to rank 2 of run 0x7, not to rank 2 of run 0x8");
  other = shape_of_run;
  other.rank = 3;
  CHECK(check_record(other, name_of_tile, sealed.seals, sealed.record) ==
        "it belongs to rank 2 of run 0x7, not to rank 3 of run 0x7");
  Sealed rewritten;
  fill_pattern(payload_of(shape_of_run, rewritten.record), 2);
  seal_record(shape_of_run, name_of_tile, rewritten.record);
  CHECK(rewritten.check() == "it is intact, but not the newest that was written");
}

TEST_CASE("seals differ by run, rank, tile, generation and region") {
  Sealed sealed;
  std::set<std::uint64_t> seen{sealed.seals.first, sealed.seals.rest};
  RecordShape other = shape_of_run;
  other.run_id = 8;
  RecordShape of_other_rank = shape_of_run;
  of_other_rank.rank = 3;
  for (const auto& [of, name] :
       {std::pair{other, name_of_tile}, std::pair{of_other_rank, name_of_tile},
        std::pair{shape_of_run, RecordName{4, 9}}, std::pair{shape_of_run, RecordName{3, 10}}}) {
    const Seals seals = seal_record(of, name, sealed.record);
    CHECK(seen.insert(seals.first).second);
    CHECK(seen.insert(seals.rest).second);
  }
}

TEST_CASE("a commit is read as it was written, and a torn one is not a commit") {
  const Aligned slot(commit_bytes);
  std::vector<std::byte> note(max_note_bytes);
  fill_pattern(note, 3);
  const CommitLabel label{11, 12, ~std::uint64_t{0}};
  write_commit(shape_of_run,
               {.generation = 4, .step = 17, .seals_hash = 99, .point = {3, 5}, .note = note, .label = label},
               slot.span());
  const auto found = read_commit(shape_of_run, slot.span());
  REQUIRE(found.has_value());
  CHECK(found->generation == 4);
  CHECK(found->step == 17);
  CHECK(found->seals_hash == 99);
  CHECK(found->point == CommitPoint{3, 5});
  CHECK(std::ranges::equal(found->note, note));
  CHECK(found->label == label);
  for (std::size_t bit = 0; bit < 8 * commit_bytes; bit += bit < 1024 ? 1 : 997) {
    flip(slot.span(), bit);
    REQUIRE_FALSE(read_commit(shape_of_run, slot.span()).has_value());
    flip(slot.span(), bit);
  }
  RecordShape other = shape_of_run;
  other.run_id = 8;
  CHECK_FALSE(read_commit(other, slot.span()).has_value());
  other = shape_of_run;
  other.rank = 3;
  CHECK_FALSE(read_commit(other, slot.span()).has_value());
}

TEST_CASE("a commit with a longer note than its block holds is not a commit") {
  const Aligned slot(commit_bytes);
  const auto block = slot.span();
  constexpr std::uint64_t most = max_note_bytes;
  for (const std::uint64_t forged : {most, most + 1, most + label_bytes, ~std::uint64_t{0}}) {
    write_commit(shape_of_run, {.generation = 4, .label = {1, 2, 3}}, block);
    std::memcpy(block.data() + 56, &forged, sizeof forged);
    const std::uint64_t seal = checksum(block.subspan(sizeof(std::uint64_t)));
    std::memcpy(block.data(), &seal, sizeof seal);
    const auto found = read_commit(shape_of_run, block);
    CHECK(found.has_value() == (forged <= most));
    if (found) CHECK(found->label == CommitLabel{1, 2, 3});
  }
}

TEST_CASE("files of another run or shape, and swapped, damaged, newer or older ones are refused") {
  const Aligned memory(block_bytes);
  const auto block = memory.span();
  const auto refusal = [&](const RecordShape& expected, FileName name) -> std::string {
    try {
      check_identity(expected, name, block, "/drive/state.records");
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  CHECK_THAT(refusal(shape_of_run, {0, 1}),
             Catch::Contains("not a record file of Ballast") && Catch::Contains("B3202"));
  write_identity(shape_of_run, {1, 2}, block);
  CHECK(refusal(shape_of_run, {1, 2}).empty());
  CHECK_THAT(refusal(shape_of_run, {0, 2}),
             Catch::Contains("B1009") && Catch::Contains("file 2 of 2, not file 1 of 2") && Catch::Contains("swapped"));
  const auto refusal_of = [&](auto&& change) {
    RecordShape other = shape_of_run;
    change(other);
    return refusal(other, {1, 2});
  };
  CHECK_THAT(refusal_of([](RecordShape& other) { other.run_id = 8; }),
             Catch::Contains("B1009") && Catch::Contains("belongs to rank 2 of run 0x7, not to rank 2 of run 0x8"));
  CHECK_THAT(refusal_of([](RecordShape& other) { other.rank = 3; }),
             Catch::Contains("B1009") && Catch::Contains("belongs to rank 2 of run 0x7, not to rank 3 of run 0x7"));
  CHECK_THAT(refusal_of([](RecordShape& other) { other.tiles = 6; }),
             Catch::Contains("B1009") && Catch::Contains("5 tiles of 10000 bytes"));
  CHECK_THAT(refusal_of([](RecordShape& other) { other.content_digest = 13; }),
             Catch::Contains("B1009") && Catch::Contains("other data"));
  block[100] ^= std::byte{1};
  CHECK_THAT(refusal(shape_of_run, {1, 2}), Catch::Contains("B3202") && Catch::Contains("damaged"));
  block[100] ^= std::byte{1};
  block[16] = std::byte{3};  // the version
  CHECK_THAT(refusal(shape_of_run, {1, 2}), Catch::Contains("B1008") && Catch::Contains("format 3"));
  block[16] = std::byte{1};
  CHECK_THAT(refusal(shape_of_run, {1, 2}), Catch::Contains("B1010") && Catch::Contains("available: format 1"));
}

// The file is sealed as an older Ballast did: 0 in the place of the rank, and a hash of name and rank as the run.
TEST_CASE("a file of format 1 is reported as old, not as damaged") {
  const Aligned memory(block_bytes);
  const auto block = memory.span();
  const auto put = [&](std::size_t offset, std::uint64_t value, std::size_t bytes) {
    std::memcpy(block.data() + offset, &value, bytes);
  };
  put(8, 0x3154534c42, 5);  // "BLST1": the identity
  put(16, 1, 4);
  put(24, 0x5eed, 8);
  put(40, 1, 8);
  put(48, shape_of_run.tiles, 8);
  put(56, shape_of_run.payload_bytes, 8);
  put(64, shape_of_run.first_bytes, 8);
  put(0, checksum(block.subspan(8)), 8);
  CHECK_THROWS_WITH(read_identity(block, "/drive/state.records"),
                    Catch::Contains("B1010") && Catch::Contains("an older format") && Catch::Contains("checkpoint"));
}
