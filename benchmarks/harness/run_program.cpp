#include "benchmarks/harness/run_program.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <cstdio>
#include <new>

namespace ballast::benchmarks {

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run) {
  try {
    app.parse(argc, argv);
    run();
    return 0;
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : 2;
  } catch (const std::bad_alloc&) {  // malloc gives no more information
    fmt::print(stderr, "{}\n", Error(Code::host_memory, {.what = "malloc got no more memory"}, Site::here()).what());
    return 2;
  } catch (const std::exception& problem) {
    fmt::print(stderr, "{}\n", problem.what());
    return 2;
  }
}

}  // namespace ballast::benchmarks
