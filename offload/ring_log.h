// The lines that a queue with a ring writes to the log. Without a log they are dropped.
#pragma once

#include <ballast/log.h>

#include <cstddef>
#include <string>

namespace ballast::offload {

void log_no_workers(Log* log);
void log_given_up(Log* log, const std::string& reason);
// Of memory. Without sparse tables, which came with Linux 5.19, the kernel registers none.
void log_unregistered(Log* log, bool has_sparse_tables, int error, std::size_t bytes);

}  // namespace ballast::offload
