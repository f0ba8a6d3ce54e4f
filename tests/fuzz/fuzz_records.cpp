// libFuzzer's entry; README.md says how to run it.
#include "tests/fuzz/records.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* bytes, std::size_t count) {
  const auto* const begin = reinterpret_cast<const std::byte*>(bytes);
  ballast::testing::read_as_record({begin, begin + count}, {.run_id = 7, .rank = 1, .tiles = 3, .payload_bytes = 9000});
  return 0;
}
