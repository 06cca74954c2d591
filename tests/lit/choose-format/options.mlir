// A schedule that does not exist is an error of the command line.
// RUN: not gossamer-opt %s -p 'choose-format{schedule=lokup}' 2>&1 | filecheck %s

// CHECK: no schedule is called 'lokup'; did you mean lookup or lookup8? valid: {{.*}}lookup
func.func @f() {
  return
}
