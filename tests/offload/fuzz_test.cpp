// A bounded search for forged record files that a reader does not survive.
#include <catch2/catch.hpp>

#include "tests/fuzz/records.h"

using namespace ballast;
using namespace ballast::offload;
using namespace ballast::testing;

TEST_CASE("forged blocks of record files with right seals are refused, or read right") {
  const RecordShape shape{
      .run_id = 7, .rank = 1, .tiles = 3, .payload_bytes = 9000, .first_bytes = 4000, .content_digest = 5};
  const std::vector<std::byte> note(100, std::byte{1});
  std::vector<std::byte> commit(commit_bytes);
  write_commit(shape, {.generation = 2, .step = 9, .seals_hash = 4, .point = {1, 2}, .note = note}, commit);
  std::vector<std::byte> identity(block_bytes);
  write_identity(shape, {}, identity);
  std::vector<std::byte> record(block_bytes + 3 * block_bytes);
  seal_record(shape, {}, record);
  for (std::vector<std::byte> genuine : {commit, identity, record}) {
    genuine.resize(160);  // zeros follow, and random changes there would hit nothing
    CHECK_NOTHROW(for_mutants(3000, [&](std::mt19937_64& random) { read_as_record(mutant(genuine, random), shape); }));
  }
}
