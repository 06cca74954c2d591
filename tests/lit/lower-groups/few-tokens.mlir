// An entry of two groups of 4 bits becomes two vectors of floats, which are scaled and multiply each token. Rows of a strip take
// their steps together, and their totals are put in order by blocks.
// RUN: gossamer-opt %s -p 'expose-storage,lower-groups,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_rows2(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x70xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[ORDER:[a-z0-9]*]]: memref<?xi8>, %[[COORD:[a-z0-9]*]]: memref<?xi8>, %[[SCALES:[a-z0-9]*]]: memref<?xi32>, %[[VALUES:[a-z0-9]*]]: memref<?xi8>,
// CHECK-DAG:     %[[LEVELS:.*]] = arith.constant dense<[0.000000e+00, 1.000000e+00, 2.000000e+00, 3.000000e+00, 4.000000e+00, 5.000000e+00, 6.000000e+00, 7.000000e+00, -8.000000e+00, -7.000000e+00,
// CHECK-DAG:     %[[FOUR:.*]] = arith.constant dense<4> : vector<16xi32>
// CHECK-DAG:     %[[UPPER:.*]] = arith.constant dense<-65536> : vector<16xi32>
// CHECK-DAG:     %[[HALF:.*]] = arith.constant dense<16> : vector<16xi32>

// The tokens, with a group of zeros behind them, the sums of a strip and the totals of a block.
// CHECK:         %[[X:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<2x96xf32>
// CHECK:         memref.view %{{.*}} : memref<?xi8> to memref<2x16x16xf32>
// CHECK:         %[[TOTALS:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<2x128xf32>

// Eight rows at once for two tokens.
// CHECK:         memref.load %[[POS]]
// CHECK:         scf.for %{{.*}} = %c0 to %c16 step %c8
// CHECK:           %{{.*}}:16 = scf.for
// CHECK-COUNT-2:     memref.prefetch %[[VALUES]][%{{.*}}], read, locality<2>, data
// CHECK:             memref.prefetch %[[SCALES]][%{{.*}}], read, locality<2>, data
// CHECK:             memref.prefetch %[[COORD]][%{{.*}}], read, locality<2>, data
// CHECK:             %[[BOTH:.*]] = memref.load %[[SCALES]]
// CHECK:             %[[PAIR:.*]] = vector.broadcast %[[BOTH]]
// CHECK:             arith.shli %[[PAIR]], %[[HALF]]
// CHECK:             arith.andi %[[PAIR]], %[[UPPER]]
// CHECK:             %[[BYTES:.*]] = vector.load %[[VALUES]][%{{.*}}] : memref<?xi8>, vector<16xi8>
// CHECK:             %[[LOW:.*]] = arith.extui %[[BYTES]] : vector<16xi8> to vector<16xi32>
// CHECK:             %[[HIGH:.*]] = arith.shrui %[[LOW]], %[[FOUR]]
// CHECK:             %[[FIRST:.*]] = llvm.call_intrinsic "llvm.x86.avx512.permvar.sf.512"(%[[LEVELS]], %[[LOW]])
// CHECK:             %[[SECOND:.*]] = llvm.call_intrinsic "llvm.x86.avx512.permvar.sf.512"(%[[LEVELS]], %[[HIGH]])
// CHECK:             %[[W:.*]] = arith.mulf %[[FIRST]],
// CHECK:             memref.load %[[COORD]]
// CHECK:             %[[TOKEN:.*]] = vector.load %[[X]][%c0, %{{.*}}] : memref<2x96xf32>, vector<16xf32>
// CHECK:             vector.fma %[[W]], %[[TOKEN]],
// CHECK:             vector.fma %[[W]],
// CHECK:             arith.mulf %[[SECOND]],
// CHECK-COUNT-2:     vector.fma
// CHECK-COUNT-28:    vector.fma
// CHECK:             scf.yield
// CHECK:         vector.store %{{.*}}, %[[TOTALS]]
// CHECK:         %[[PLACES:.*]] = vector.load %[[ORDER]][%{{.*}}] : memref<?xi8>, vector<16xi8>
// CHECK:         %[[AT:.*]] = arith.extui %[[PLACES]] : vector<16xi8> to vector<16xi32>
// CHECK:         vector.gather %[[TOTALS]][%c0, %c0] [%[[AT]]]
// CHECK-LABEL: func.func private @region_rows1(
func.func @region(%x: tensor<?x70xf32>, %w: tensor<40x70xf32, "groups(reduction=1, bits=4, places=8, scale=16)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "groups", tile = [2]} : (tensor<?x70xf32>, tensor<40x70xf32, "groups(reduction=1, bits=4, places=8, scale=16)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
