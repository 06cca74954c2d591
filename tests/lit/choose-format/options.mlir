// A schedule that does not exist is an error of the command line.
// RUN: not gossamer-opt %s -p 'choose-format{schedule=gathr}' 2>&1 | filecheck %s

// CHECK: no schedule is called 'gathr'; did you mean gather or gpu-gather? valid: {{.*}}gather
func.func @f() {
  return
}
