#include "zero/plan/verify.h"

#include "zero/plan/verify_bytes.h"
#include "zero/plan/verify_order.h"

namespace ballast {

std::vector<std::string> verify(const CompileInput& input, const Program& program) {
  const Unrolled unrolled(program);
  std::vector<std::string> problems = unrolled.races();
  for (const auto& more : {unrolled.early_writes(), wrong_bytes(input, program)}) {
    problems.insert(problems.end(), more.begin(), more.end());
  }
  return problems;
}

}  // namespace ballast
