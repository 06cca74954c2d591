// A layout that does not exist is an error of the command line.
// RUN: not gossamer-opt %s -p 'choose-format{layout=columns}' 2>&1 | filecheck %s

// CHECK: layout of choose-format is 'columns', must be kblock or rows
func.func @f() {
  return
}
