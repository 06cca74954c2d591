// What the nonzeros of 16 rows want of a window of some tokens is looked up and multiplied, four nonzeros a row at a time.
// RUN: gossamer-opt %s -p 'expose-storage,lower-lookup8,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_copied16(
// CHECK-LABEL: func.func private @region_copied8(
// CHECK-LABEL: func.func private @region_copied2(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x70xi8>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[WINDOWS:[a-z0-9]*]]: memref<?xi32>, %[[PLACES:[a-z0-9]*]]: memref<?xi8>, %[[VAL:[a-z0-9]*]]: memref<?xi8>,
// CHECK-DAG:     %[[HIGH:.*]] = arith.constant dense<-128> : vector<64xi8>

// x + 128 is copied, up to whole windows.
// CHECK:         %[[COPY:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x128xi8>
// CHECK:         arith.xori %{{.*}} : vector<32xi8>
// CHECK:         vector.store %{{.*}}, %[[COPY]]

// CHECK:         memref.load %[[POS]]
// CHECK:         memref.load %[[WINDOWS]]
// CHECK:         %[[WANTED:.*]] = vector.load %[[PLACES]][%{{.*}}] : memref<?xi8>, vector<64xi8>
// CHECK:         %[[W:.*]] = vector.load %[[VAL]][%{{.*}}] : memref<?xi8>, vector<64xi8>
// CHECK-COUNT-2: vector.load %[[COPY]][%{{.*}}] : memref<32x128xi8>, vector<64xi8>
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.x86.avx512.permvar.qi.512"(%{{.*}}, %[[WANTED]])
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"(%{{.*}}, %{{.*}}, %[[W]])
// CHECK:         llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"(%{{.*}}, %[[HIGH]], %[[W]])
func.func @region(%x: tensor<?x70xi8>, %w: tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=0)">, %scale: tensor<40xf32>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (m)>} : (tensor<40xf32>) -> f32
    %0 = arith.sitofp %sum : i32 to f32
    %1 = arith.mulf %0, %s : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "lookup8", tile = [32, 32]} : (tensor<?x70xi8>, tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=0)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
